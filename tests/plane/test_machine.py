"""Cores and memory within a container's limits: files as the kernel writes them, and this kernel's own."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dataplane import machine

GIB = 1 << 30
UNLIMITED = "9223372036854771712"
LOOK = "from dataplane.machine import *; print(usable_cores(), available_bytes())"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 64 cores with 100 GiB, whose files are in this folder."""
    monkeypatch.setattr(machine, "PROC", tmp_path / "proc")
    monkeypatch.setattr(machine, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    write(tmp_path, {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable:   {100 * GIB // 1024} kB\n"})
    return tmp_path


def write(folder: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def v2(folder: str, cpu: str, limit: str, used: int = 0, inactive: int = 0) -> dict[str, str]:
    folder = f"cgroup/{folder}".rstrip("/")
    return {
        f"{folder}/cpu.max": cpu,
        f"{folder}/memory.max": limit,
        f"{folder}/memory.current": f"{used}\n",
        f"{folder}/memory.stat": f"anon 7\ninactive_file {inactive}\n",
    }


def v1(folder: str, quota: int, limit: str, used: int = 0, inactive: int = 0) -> dict[str, str]:
    cpu, memory = f"cgroup/cpu,cpuacct/{folder}".rstrip("/"), f"cgroup/memory/{folder}".rstrip("/")
    return {
        f"{cpu}/cpu.cfs_quota_us": f"{quota}\n",
        f"{cpu}/cpu.cfs_period_us": "100000\n",
        f"{memory}/memory.limit_in_bytes": f"{limit}\n",
        f"{memory}/memory.usage_in_bytes": f"{used}\n",
        f"{memory}/memory.stat": f"inactive_file 1\ntotal_inactive_file {inactive}\n",
    }


IN_V2, IN_V1 = "0::/a/b\n", "4:memory:/a/b\n3:cpu,cpuacct:/a/b\n1:name=systemd:/a/b\n0::/\n"


@pytest.mark.parametrize(
    ("own", "texts", "cores", "room"),
    [
        ("", {}, 64, 100 * GIB),
        (IN_V2, v2("a/b", "max 100000\n", "max\n"), 64, 100 * GIB),
        (IN_V2, v2("a/b", "250000 100000\n", f"{4 * GIB}\n", GIB, GIB // 2), 2, 3 * GIB + GIB // 2),
        (IN_V2, v2("a/b", "50000 100000\n", "0\n", GIB), 1, 0),
        (IN_V2, v2("a", "300000 100000\n", f"{2 * GIB}\n") | v2("a/b", "800000 100000\n", f"{9 * GIB}\n"), 3, 2 * GIB),
        (IN_V2, v2("", "400000 100000\n", f"{5 * GIB}\n"), 4, 5 * GIB),
        (IN_V1, v1("a/b", -1, UNLIMITED, GIB), 64, 100 * GIB),
        (IN_V1, v1("a/b", 600_000, str(8 * GIB), 2 * GIB, GIB), 6, 7 * GIB),
        (IN_V1, v1("", 100_000, str(GIB)), 1, GIB),
    ],
)  # fmt: skip
def test_the_least_of_all_limits(files: Path, own: str, texts: dict[str, str], cores: int, room: int) -> None:
    write(files, {"proc/self/cgroup": own} | texts)
    assert (machine.usable_cores(), machine.available_bytes()) == (cores, room)


def test_files_that_say_nothing(files: Path) -> None:
    write(files, {"proc/self/cgroup": IN_V2, "cgroup/a/b/cpu.max": "\n", "cgroup/a/b/memory.max": "?\n"})
    (files / "proc/meminfo").unlink()
    assert (machine.usable_cores(), machine.available_bytes()) == (64, None)


def look(prepare: str = "") -> tuple[int, int]:
    said = subprocess.run([sys.executable, "-c", prepare + LOOK], check=True, capture_output=True, text=True).stdout
    cores, room = said.split()
    return int(cores), int(room)


def test_affinity_counts() -> None:
    assert look("import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n")[0] == 1


@contextlib.contextmanager
def own_cgroup(controller: str, **limits: int) -> Iterator[Path]:
    """A cgroup (v1) of this kernel."""
    folder = machine.CGROUPS / controller / f"kvmesh-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup of {controller} may be made here: {error}")
    try:
        for name, value in limits.items():
            (folder / f"{controller}.{name}").write_text(str(value))
        yield folder
    finally:
        folder.rmdir()


def test_a_cgroup_of_this_kernel() -> None:
    with (
        own_cgroup("cpu", cfs_period_us=100_000, cfs_quota_us=100_000) as cpu,
        own_cgroup("memory", limit_in_bytes=GIB) as memory,
    ):
        enter = "".join(f"open({str(folder / 'tasks')!r}, 'w').write('0')\n" for folder in (cpu, memory))
        cores, room = look(enter)
        assert cores == 1 and GIB // 2 < room < GIB
