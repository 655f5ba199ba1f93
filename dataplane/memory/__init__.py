"""Bytes: arenas, the rows of a frame in them, digests, compression."""
