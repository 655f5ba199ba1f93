"""The KV store: takes blocks that workers are about to evict, and lends them like any holder."""
