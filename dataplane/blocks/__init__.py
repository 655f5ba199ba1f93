"""What lies where: the layout of KV in an arena, its blocks, whose they are, and who may read them. Pure."""
