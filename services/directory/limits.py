"""Limits of the directory."""

MAX_READING = 2
"""So many inventories are read at a time: a thousand answers at once are more than a connection may keep waiting, and
would be handled one after the other without a question in between."""

PAGE_PART_BLOCKS = 8_192
"""A page is handled in parts of so many blocks, some milliseconds each, so that questions are answered in between."""

MAX_EVENT_BLOCKS = 16_384
"""An event of more is dropped, and what was missed is read from the inventory: a page can be handled in parts, an event
cannot."""

MAX_LOCATE_BLOCKS = 65_536
"""A question about a longer prompt, a million tokens in blocks of 16, is answered for so much of it."""

MAX_PENDING_EVENTS = 10_000
MAX_PENDING_BLOCKS = 100_000
"""So many events of one holder, of so many blocks in all, are kept while its inventory is read; with one more they are
given up, and the reading begins anew."""

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
"""Of one holder on one tier so many blocks are known, and no more than it reports that it has room for. A card's memory
holds some 100,000 blocks."""
MAX_BLOCKS = 10_000_000
"""Distinct blocks of all holders: some 40 bytes each. What is beyond a bound is not known here, and computed rather
than read."""

FADE_AFTER = 8
"""Once each block was asked for so often, on average, all counts of that are halved. With ten million blocks that takes
some 30 ms, once in a hundred thousand questions about 800 blocks."""

MAX_SETS = 500_000
"""Different sets of holders: some 300 bytes each with a thousand holders. Beyond it what would make one more is passed
over: a block is not known of one more holder, or goes on being named for one that has evicted it."""

MAX_RUN_ENDS = 10_000
"""`locate` follows the beginnings and ends of so many runs, some 10 ms, and looks no further along the prompt: holders
with every other block must not keep everybody waiting."""
