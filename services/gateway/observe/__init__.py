"""What a gateway measures of its requests, and what it publishes of them for people."""
