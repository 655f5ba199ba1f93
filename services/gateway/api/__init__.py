"""HTTP and OpenAI's API: what is asked, how it is answered."""
