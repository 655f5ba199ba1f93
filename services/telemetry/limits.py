"""Limits of what a service reports of itself: spans and metrics."""

MAX_UNSENT = 65_536
"""Spans that wait to be exported; more are dropped, and counted."""
MAX_BATCH = 512
"""Spans of one export."""
TRACE_FILES = 8
"""A service's spans are in so many files at most: the oldest of them goes first."""
MAX_SPANS = 16_384
"""Spans that are kept of traces that are not sampled, of all together: about 10 MiB, a busy worker's last minute."""
MAX_KEPT_TRACES = 4_096
"""So many traces that were asked for are remembered: their later spans are exported too."""

MAX_SERIES = 512
"""Series of one metric of one service; further label values are counted together, as `other`."""

MAX_SCRAPES = 16
"""Connections to a service's metrics at a time."""
SCRAPE_HEAD_S = 5.0
"""One of them that sends nothing for so long is closed."""
ACCEPT_PAUSE_S = 0.1
"""Where no descriptor is to be had for the next one: so long until it is tried again."""
