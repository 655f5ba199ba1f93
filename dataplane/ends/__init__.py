"""Who serves KV and who reads it: the plane's two ends, and the choice of a carrier between them."""
