"""The engine on a graphics card. Optional: imported only where one was asked for."""
