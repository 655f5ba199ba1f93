"""The measurements of `kvmesh bench`, one module each. All but `crossover` and `loss` speak HTTP, as a client does."""
