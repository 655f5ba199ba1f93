"""The measurements of `kvmesh bench`, one module for each command. What they share is in `drive/`.

Most send HTTP requests to a gateway, as a client does; `crossover` also asks workers over the bus, `loss` runs an
engine by itself, and `links` only calculates.
"""
