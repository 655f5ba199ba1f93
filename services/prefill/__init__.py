"""Computes prompts, sends token 0, and hands the KV over, or goes on decoding where there is no hand-over."""
