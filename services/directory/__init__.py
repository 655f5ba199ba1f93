"""Knows which worker holds which block. Owns nothing: a hint, rebuilt from what the workers say."""
