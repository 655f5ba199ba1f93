"""What the benches share: load, meshes, models, figures."""
