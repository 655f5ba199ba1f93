"""The whole mesh in one process under virtual time, with a hostile network: `kvmesh simulate`, and `make sim`."""
