"""KV on graphics cards. Optional: nothing outside knows more of it than its one factory."""
