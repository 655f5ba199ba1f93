"""Load tools for people who run a mesh. They speak HTTP, as a client does."""
