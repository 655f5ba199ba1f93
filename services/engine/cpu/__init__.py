"""The engine on the processor."""
