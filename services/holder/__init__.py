"""What every worker does, whatever its role: hold blocks, serve reads, run the engine, report how it is."""
