"""The KV that a worker holds, lends and reads."""
