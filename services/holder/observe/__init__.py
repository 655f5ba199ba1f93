"""What a worker measures, and what it says of itself."""
