"""What a worker measures, and what it reports of itself."""
