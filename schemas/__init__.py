"""What is said: every message of the mesh, its subject, and block identity. Standard library and msgspec only."""
