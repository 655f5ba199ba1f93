"""Real CPU time of a simulation, by who takes it. One thread runs all of a simulation, so its clock is read whenever
somebody else goes on."""

import time


class CpuAccount:
    """What somebody has taken, in seconds. `passed_s`: so much of it has passed in virtual time too."""

    __slots__ = ("passed_s", "taken_s")

    def __init__(self) -> None:
        self.taken_s = 0.0
        self.passed_s = 0.0

    @property
    def lag_s(self) -> float:
        return self.taken_s - self.passed_s


class CpuMeter:
    """Adds the thread's time to one account at a time."""

    def __init__(self) -> None:
        self.rest = CpuAccount()
        """The simulator's own."""
        self._account = self.rest
        self._since_s = time.thread_time()

    def switch(self, account: CpuAccount) -> CpuAccount:
        """From now on it is this one's time. Return whose it was."""
        now_s = time.thread_time()
        before, self._account = self._account, account
        before.taken_s += now_s - self._since_s
        self._since_s = now_s
        return before
