"""KV beneath stock `vllm serve`: a holder whose blocks attached servers fill and load."""
