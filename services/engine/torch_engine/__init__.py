"""Our own engine: a transformers model on the CPU or on a card, with KV in blocks."""
