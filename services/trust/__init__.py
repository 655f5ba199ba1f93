"""Who is who on the bus: keys, identities, and what the broker is told of them."""
