"""Who is who on the bus: keys, identities, and what the broker is given of them."""
