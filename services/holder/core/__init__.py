"""What a worker decides. Pure."""
