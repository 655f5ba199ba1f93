"""What of the machine this process may use: cores and memory, as its affinity and its container (cgroups v1, v2) leave.

A container sees the whole machine in /proc; what it gets is in its cgroup, and in every cgroup above it that it sees.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Return on how many cores this process may compute at once: at least 1."""
    cores = float(len(os.sched_getaffinity(0)))
    for folder in _cgroups("cpu"):
        with contextlib.suppress(OSError, ValueError):
            quota, period = _quota(folder)
            if quota > 0:
                cores = min(cores, quota / period)
    return max(1, int(cores))


def available_bytes() -> int | None:
    """Return how much memory can be had; None: unknown."""
    rooms: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        rooms.append(_number_of("MemAvailable:", PROC / "meminfo") * 1024)
    for folder in _cgroups("memory"):
        with contextlib.suppress(OSError, ValueError):
            rooms.append(_room(folder))
    return min(rooms, default=None)


def own_bytes(pid: int) -> int:
    """Return the memory that would be free if a process were not; what it shares with others, as the one that has
    forked it, is not counted. 0: it has ended."""
    try:
        return 1024 * _number_of("Private_Dirty:", PROC / f"{pid}/smaps_rollup")
    except OSError:
        return 0


def _cgroups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and of those above it, as far as they are seen from here."""
    try:
        lines = (PROC / "self/cgroup").read_text("utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = CGROUPS / controllers if controllers else CGROUPS
        own = top / path.strip("/")
        yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(top) and folder.is_dir())


def _quota(folder: Path) -> tuple[float, float]:
    """Return how long the cgroup may compute in each period; no positive number: as long as it likes."""
    v2 = folder / "cpu.max"
    if v2.exists():
        quota, period = v2.read_text("utf-8").split()
    else:
        quota, period = ((folder / f"cpu.cfs_{what}_us").read_text("utf-8") for what in ("quota", "period"))
    return float(quota), float(period)


def _room(folder: Path) -> int:
    """Return what the cgroup may still take. Pages of files that nobody has used lately can be had back."""
    if (folder / "memory.max").exists():
        names, inactive = ("memory.max", "memory.current"), "inactive_file"
    else:
        names, inactive = ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_inactive_file"
    limit, used = (int((folder / name).read_text("utf-8")) for name in names)
    return max(0, limit - used + _number_of(inactive, folder / "memory.stat"))


def _number_of(name: str, file: Path) -> int:
    """Raises ValueError where the file has no such line."""
    for line in file.read_text("utf-8").splitlines():
        if line.split()[:1] == [name]:
            return int(line.split()[1])
    raise ValueError(f"{file} has no {name}")
