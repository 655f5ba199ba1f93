"""Where a request goes, and what that costs. Pure, but for `hints`.

`place` chooses the workers of one request. A placement is priced in `cost` (policy `cost`), from what the workers have
measured (`known_rates`); the simple policies are in `policy`. `fleet_view` is a worker as it last described itself,
`admission` refuses what would wait too long, `hints` asks the directory who holds what.
"""
