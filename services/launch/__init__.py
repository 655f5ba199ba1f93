"""A mesh as child processes: started with progress, watched, started again, stopped."""
