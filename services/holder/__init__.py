"""What every worker does, whatever its role: hold blocks, serve reads, run the engine, say how it is."""
