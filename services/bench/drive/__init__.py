"""What the measurements share: meshes and models to measure, clients, workloads, statistics."""
