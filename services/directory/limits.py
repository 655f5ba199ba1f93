"""Times and limits of the directory."""

INVENTORY_TIMEOUT_S = 2.0
"""For one page of an inventory. A worker that does not answer is asked again when it speaks next."""

FORGET_AFTER_MS = 15_000
"""A holder that has said nothing for so long is forgotten, as whoever would say that it has left may have ended too.
Workers say their load twice a second; one that speaks again has its inventory read."""

TICK_S = 5.0
"""How often the directory looks for holders that are silent: often enough beside FORGET_AFTER_MS."""

MAX_PENDING_EVENTS = 10_000
"""Events of one holder that are kept while its inventory is read; one more starts the reading anew."""

MAX_ENDED = 10_000
"""Incarnations of workers that are remembered as over, so that a late event does not bring their blocks back."""

MAX_RESTARTS = 3
"""How often one reading begins again because its pages were of different moments. After that the worker's next word
begins another: a worker whose contents change all the time must not be asked all the time."""

SWEEP_BLOCKS = 20_000
"""Blocks that one slice of a sweep looks at: a few milliseconds, for which nobody is answered."""

MAX_PREFIXES = 32
MAX_LATER_RUNS = 32
"""Holders of a prefix and of later runs that one answer names: the scheduler reads from few, and the longest are
first."""

MAX_SHARED_MASKS = 100_000
"""Different sets of holders whose integer is shared by all blocks that have it. Sharing begins anew beyond it; blocks
keep the integer they have."""
