"""What a holder measures, and what it reports of itself."""
