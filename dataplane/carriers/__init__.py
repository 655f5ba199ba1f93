"""How bytes cross between arenas in host memory: shared memory, TCP, and inside one process.

A carrier is three functions: `describe` gives at the holder what a reader must know of its memory, `send_frame` sends a
frame, `take_frame` takes it in (`carrier.py`). Planning frames, checking and committing them, leases and failures are
not a carrier's. To add one:

1. Write its two ends, `HolderEnd` and `ReaderEnd`, in a module with its `NAME`.
2. Let the arenas that it leads between make them: `HostArena` in `host.py`, or one of another kind of memory.
   `leads_from` says when it leads there, `offered` whether "auto" offers it.
3. If its bytes follow their headers on the wire, see where the ends ask for `tcp.NAME`: whether KV may be compressed
   (`ends/read.py`, `ends/sender.py`).
4. Name it in `Carrier` in `services/config.py`, so that it can be asked for.
5. Add it to `CARRIERS` in `tests/plane/harness.py`: `test_contract.py`, `test_faults.py` and `test_bad_references.py`
   then run over it, and it is done when these pass.
"""
