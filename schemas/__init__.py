"""What is sent: every message of the mesh, its subject, and block identity. Standard library and msgspec only."""
