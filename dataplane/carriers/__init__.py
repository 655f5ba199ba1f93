"""How bytes cross between arenas in host memory: shared memory, TCP, and inside one process.

To add a carrier:

1. Write its two ends, the protocols `HolderCarrier` and `ReaderCarrier` (`carrier.py`), in a module with its `NAME`.
   Planning frames, checking and committing them, leases and failures are not a carrier's: it moves a frame's bytes and
   says what their digest was at its end.
2. The arena at each end creates them: for host memory in `host.py`, where `HostHolderSide.carrier` and
   `HostApproach.end` make the ends, `HostPlace` says how good it is and when it leads there, and `HostArena.offered`
   says whether "auto" offers it; for memory of another kind in a `KVArena` (`kv_arena.py`) of that kind.
3. If its bytes follow their headers on the wire, see where the ends ask for `tcp.NAME`: whether a connection reads
   ahead (`ends/reader.py`), and whether KV may be compressed (`ends/read.py`, `ends/sender.py`).
4. Name it in `Carrier` in `services/config.py`, so that it can be asked for.
5. Add it to `CARRIERS` in `tests/plane/harness.py`: `test_contract.py`, `test_faults.py` and `test_bad_references.py`
   then run over it, and it is done when these pass.
"""
