"""Times and limits of the directory."""

INVENTORY_TIMEOUT_S = 2.0
"""A worker has this long to answer with one page of its inventory. One that does not is asked again
when it speaks next."""

FORGET_AFTER_MS = 15_000
"""A holder that has said nothing for so long is forgotten, as whoever would say that it has left may have ended too.
Workers say their load twice a second; one that speaks again has its inventory read."""

TICK_S = 5.0
"""The directory looks for holders that are silent so often: often enough beside FORGET_AFTER_MS."""

MAX_PENDING_EVENTS = 10_000
"""So many events of one holder are kept while its inventory is read; one more starts the reading anew."""

MAX_ENDED = 10_000
"""So many incarnations of workers are remembered as over, so that a late event does not bring their blocks back."""

MAX_RESTARTS = 3
"""How often one reading begins again because its pages were of different moments. After that the worker's next word
begins another: a worker whose contents change all the time must not be asked all the time."""

SWEEP_BLOCKS = 20_000
"""One slice of a sweep looks at so many blocks: a few milliseconds, for which nobody is answered."""

MAX_PREFIXES = 32
MAX_LATER_RUNS = 32
"""One answer names so many holders of a prefix and of later runs: the scheduler reads from few, and the longest are
first."""

MAX_HOLDERS = 4_096
"""So many holders are known at a time; whoever speaks as one more is passed over until others have gone."""
MAX_HOLDER_BLOCKS = 1_000_000
"""Of one holder on one tier so many blocks are known, and of a worker's arena or a store's memory no more than it says
that it has. A card's memory holds some 100,000 blocks."""
MAX_BLOCKS = 4_000_000
"""Distinct blocks of all holders: some 500 MB. What is beyond a bound is not known here, and computed rather than
read."""

MAX_SHARED_MASKS = 100_000
"""The integers of so many different sets of holders are shared by all blocks that have them. Beyond it sharing begins
anew; blocks keep the integer they have."""
