"""Runs a mesh as child processes: starts, watches, restarts and stops them. `serve` is what runs in each child."""
