"""Knows which worker holds which block. A hint, rebuilt from what the workers report; all that it owns is how often
each block was asked for."""
