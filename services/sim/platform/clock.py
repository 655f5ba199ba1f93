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


BOOT_NS = 1_000_000_000_000
"""A machine's monotonic clock as the simulation begins, unless a process has one of its own."""


class LocalClock:
    """The clocks of one process's machine: both begin where they like and go on as quickly as `rate` says; that of the
    date may be set. Timers go by the simulation's own time."""

    def __init__(self, boot_ns: int = BOOT_NS, ahead_ns: int = 0) -> None:
        self.ahead_ns = ahead_ns
        """By how much its date is ahead of the true one, drift aside."""
        self._rate = 1.0
        self._boot_ns = boot_ns
        self._true_ns, self._monotonic_ns = 0, boot_ns

    def drift(self, rate: float, now_ns: int) -> None:
        """Go on at `rate` seconds a second from now on."""
        self._true_ns, self._monotonic_ns, self._rate = now_ns, self.monotonic_ns(now_ns), rate

    def monotonic_ns(self, now_ns: int) -> int:
        return self._monotonic_ns + round((now_ns - self._true_ns) * self._rate)

    def unix_ns(self, now_ns: int) -> int:
        return EPOCH_NS + self.ahead_ns + self.monotonic_ns(now_ns) - self._boot_ns


class VirtualTime:
    """Seconds since the simulation began. Only the loop advances it. What product code reads are the clocks of the
    process that runs (`local`)."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.now_ns = 0
        machine = LocalClock()
        self.local: Callable[[], LocalClock] = lambda: machine

    def move_to(self, now_s: float) -> None:
        self.now_s = now_s
        self.now_ns = round(now_s * 1e9)

    def time_ns(self) -> int:
        return self.local().unix_ns(self.now_ns)

    def monotonic_ns(self) -> int:
        return self.local().monotonic_ns(self.now_ns)

    def time(self) -> float:
        return self.time_ns() / 1e9

    def monotonic(self) -> float:
        return self.monotonic_ns() / 1e9


@contextlib.contextmanager
def installed(clock: VirtualTime, rng: random.Random) -> Generator[None]:
    """Replace the process's clock and its sources of randomness while the block runs. One simulation at a time."""
    state = random.getstate()
    random.seed(rng.getrandbits(64))  # span ids come from the module's own generator

    # `secrets` reads the operating system's randomness, which no seed decides: draw its ids from `rng` instead.
    def token_hex(num_bytes: int | None = None) -> str:
        return f"{rng.getrandbits(8 * (num_bytes or 32)):0{2 * (num_bytes or 32)}x}"

    # Only the thread that runs the simulation sleeps in virtual time; any other thread sleeps in real time.
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
    # Register each restoration before the replacement: an error midway leaves no virtual clock behind.
    with contextlib.ExitStack() as undo:
        undo.callback(random.setstate, state)
        for name, function in time_functions.items():
            undo.callback(setattr, time, name, getattr(time, name))
            setattr(time, name, function)
        for name, function in {"token_hex": token_hex, "randbits": rng.getrandbits}.items():
            undo.callback(setattr, secrets, name, getattr(secrets, name))
            setattr(secrets, name, function)
        yield
