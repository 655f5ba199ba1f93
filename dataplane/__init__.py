"""How bytes move: arenas, pools, leases, tickets, one stream protocol and its carriers. Knows no service and no bus."""
