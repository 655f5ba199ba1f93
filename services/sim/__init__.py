"""The simulator: the whole mesh in one process and virtual time, with faults (`kvmesh simulate`, `make sim`).

`world` runs one seed, `many` runs many; `mesh` starts the services, `client` sends the requests, `scenario` says which
faults there are and `faults` causes them. `scale` measures a large mesh, of which is asked what `offered` says. What
the services run on is in `platform/`, what must be true of a run in `verdict/`.
"""
