"""What must be true of a simulation, during the run and after it."""
