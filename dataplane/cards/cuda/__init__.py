"""A CUDA card: the driver by CuPy, and the one kernel."""
