"""What is said of KV that moves: the one stream protocol, and what it is spoken over."""
