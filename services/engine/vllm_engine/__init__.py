"""vLLM as a worker's engine: it schedules and computes, and a connector copies whole blocks between its KV and the
worker's arena. `vllm` itself is imported by `connector.py`, `loading.py` and `sampling.py` only."""
