"""One request's life: what the gateway decides, and what carries it out."""
