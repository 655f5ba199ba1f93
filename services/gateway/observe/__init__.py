"""What a gateway measures and what it tells people of its requests."""
