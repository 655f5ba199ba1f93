"""Virtual time and seeded randomness in place of the machine's.

Product code reads the clock through the module `time` and makes ids through `secrets`. Functions of both modules are
replaced while a simulation runs, and restored after it: product code runs unchanged.
"""

import contextlib
import random
import secrets
import threading
import time
from collections.abc import Callable, Generator

from services.sim.platform.threads import is_thread, pause

EPOCH_NS = 1_800_000_000_000_000_000
"""Unix time at which every simulation begins, in ns."""


class VirtualTime:
    """Seconds since the simulation began. Only the loop advances it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._now_ns = 0
        self._unix_ns = EPOCH_NS

    def move_to(self, now_s: float) -> None:
        self.now_s = now_s
        self._now_ns = round(now_s * 1e9)
        self._unix_ns = EPOCH_NS + self._now_ns

    def time_ns(self) -> int:
        return self._unix_ns

    def monotonic_ns(self) -> int:
        return self._now_ns

    def time(self) -> float:
        return self._unix_ns / 1e9

    def monotonic(self) -> float:
        return self.now_s


@contextlib.contextmanager
def installed(clock: VirtualTime, rng: random.Random) -> Generator[None]:
    """Replace the process's clock and its sources of randomness while the block runs. One simulation at a time."""
    state = random.getstate()
    random.seed(rng.getrandbits(64))  # span ids come from the module's own generator

    def token_hex(num_bytes: int | None = None) -> str:
        return f"{rng.getrandbits(8 * (num_bytes or 32)):0{2 * (num_bytes or 32)}x}"

    owner, really_sleep = threading.get_ident(), time.sleep

    def sleep(seconds: float) -> None:
        """Where no cooperative thread sleeps, everything stands still meanwhile."""
        if threading.get_ident() != owner:
            really_sleep(seconds)
            return
        until_s = clock.now_s + seconds
        while clock.now_s < until_s:
            pause(until_s - clock.now_s) if is_thread() else clock.move_to(until_s)

    time_functions: dict[str, Callable[..., float | int | None]] = {
        "sleep": sleep,
        "time": clock.time,
        "time_ns": clock.time_ns,
        "monotonic": clock.monotonic,
        "monotonic_ns": clock.monotonic_ns,
        "perf_counter": clock.monotonic,
        "perf_counter_ns": clock.monotonic_ns,
    }
    with contextlib.ExitStack() as undo:
        undo.callback(random.setstate, state)
        for name, function in time_functions.items():
            undo.callback(setattr, time, name, getattr(time, name))
            setattr(time, name, function)
        for name, function in {"token_hex": token_hex, "randbits": rng.getrandbits}.items():
            undo.callback(setattr, secrets, name, getattr(secrets, name))
            setattr(secrets, name, function)
        yield
