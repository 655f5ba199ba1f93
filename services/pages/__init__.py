"""Makes the generated parts of the pages, and their pictures."""
