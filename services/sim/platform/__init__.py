"""The whole mesh in one process under virtual time."""
