"""What a holder of KV does, as a worker and a store have one: hold blocks, lend them, read, report how it is."""
