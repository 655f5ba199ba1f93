"""Makes room, reads the prompt's KV under a lease, and decodes. What does not arrive it computes."""
