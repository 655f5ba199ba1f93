"""How bytes cross between arenas in host memory: shared memory, TCP, and inside one process."""
