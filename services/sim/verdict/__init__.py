"""What must be true of a simulation, during it and after it."""
