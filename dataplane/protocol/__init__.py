"""What is sent to move KV: the one stream protocol, and what it is spoken over."""
