"""How long the benches wait, in seconds."""

REQUEST_TIMEOUT_S = 600.0
"""One HTTP request: a prompt of the longest kind on a slow machine ends well within it."""
RESTART_TIMEOUT_S = 60.0
"""A worker of `kvmesh bench multiturn --restart`, from its end until the scheduler knows its successor."""
RESTART_INTERVAL_S = 0.1
"""Between two questions to the scheduler about it."""
BURST_SETTLE_S = 0.3
"""Between two looks at the workers' counters, until a burst changes them no more."""
FIRST_LINE_S = 2.0
"""Where stderr is no terminal: until a measurement first reports how far it is."""
LINE_INTERVAL_S = 10.0
"""And then from one such line to the next."""
