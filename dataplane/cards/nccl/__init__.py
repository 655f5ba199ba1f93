"""KV between two cards: a communicator for each pair of workers."""
