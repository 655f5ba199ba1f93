"""What runs in the processes of an attached server: one class of vLLM's, in two halves.

Its distribution is a wheel of its own (`services/attach/wheel.py`), beside the user's vLLM: nothing here may need more
than the standard library, msgspec, numpy, torch and xxhash, but for `connector.py`, which imports vLLM.
"""
