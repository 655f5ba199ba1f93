import gc
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from dataplane.blocks.layout import uniform_shape
from dataplane.carriers.host import AttachedArenas
from dataplane.memory import arena as arena_module
from dataplane.memory.arena import (
    HEADER_BYTES,
    SHM_DIR,
    Arena,
    ArenaMissingError,
    ArenaTooLargeError,
    remove_stale_arenas,
)
from schemas.handoff import Endpoint
from tests.plane.harness import LAYOUT


def test_attached_arena_shows_the_same_bytes_read_only() -> None:
    owned = Arena.create(uniform_shape(LAYOUT, 4))
    attached = Arena.attach(owned.name, owned.nonce)
    assert owned.num_bytes == attached.num_bytes == len(owned.buffer) == 4 * LAYOUT.block_bytes
    assert not owned.array.any()
    owned.buffer[5] = 7
    assert attached.array[5] == attached.buffer[5] == owned.array[5] == 7
    with pytest.raises(TypeError):
        attached.buffer[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        attached.array[0] = 1
    attached.close()
    assert (SHM_DIR / owned.name).exists(), "only the owner removes it"
    owned.close()
    owned.close()
    assert not (SHM_DIR / owned.name).exists()


def test_file_is_the_owner_s_alone() -> None:
    owned = Arena.create(uniform_shape(LAYOUT, 4))
    assert (SHM_DIR / owned.name).stat().st_mode & 0o777 == 0o600
    owned.close()


def test_views_outlive_the_arena() -> None:
    owned = Arena.create(uniform_shape(LAYOUT, 4))
    attached = Arena.attach(owned.name, owned.nonce)
    view, far = owned.array[3:9], attached.array[3:9]
    owned.close()
    attached.close()
    view[:] = 5
    assert (far == 5).all()
    del view, far
    gc.collect()


def test_arena_that_is_missing_or_another() -> None:
    owned = Arena.create(uniform_shape(LAYOUT, 1))
    for name, nonce in [
        (owned.name, "0" * 32),
        (owned.name, "é"),
        (owned.name, ""),
        (f"kvmesh-{os.getpid()}-{'0' * 16}", owned.nonce),
        ("../etc/passwd", owned.nonce),
        ("/etc/passwd", owned.nonce),
        ("", ""),
    ]:
        with pytest.raises(ArenaMissingError) as raised:
            Arena.attach(name, nonce)
        assert raised.value.name == name
    owned.close()


@pytest.mark.parametrize("content", [b"", b"x" * 100, bytes(HEADER_BYTES), bytes(HEADER_BYTES + 100)])
def test_file_that_is_no_arena(content: bytes) -> None:
    path = SHM_DIR / f"kvmesh-{os.getpid()}-{'f' * 16}"
    path.write_bytes(content)
    try:
        with pytest.raises(ArenaMissingError):
            Arena.attach(path.name, "0" * 32)
    finally:
        path.unlink()


def test_too_large_says_how_large() -> None:
    with pytest.raises(ArenaTooLargeError) as raised:
        Arena.create(uniform_shape(LAYOUT, 1 << 40))
    assert raised.value.needed > raised.value.available > 0
    assert "--shm-size" in str(raised.value) and "\n" not in str(raised.value)


def test_all_of_it_is_there_from_the_start() -> None:
    """Memory that only seems to be there would end its owner with SIGBUS as somebody else fills the rest."""
    owned = Arena.create(uniform_shape(LAYOUT, 64))
    try:
        status = (SHM_DIR / owned.name).stat()
        assert status.st_blocks * 512 >= status.st_size
    finally:
        owned.close()


@pytest.fixture
def own_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where arenas lie meanwhile: nobody beside this test cleans up there."""
    monkeypatch.setattr(arena_module, "SHM_DIR", tmp_path)
    return tmp_path


def test_arenas_of_the_dead_are_removed(own_dir: Path) -> None:
    leave = "import os; from pathlib import Path; from dataplane.memory import arena\n"
    leave += "from dataplane.blocks.layout import uniform_shape; from tests.plane.harness import LAYOUT\n"
    leave += f"arena.SHM_DIR = Path({str(own_dir)!r})\n"
    leave += "print(arena.Arena.create(uniform_shape(LAYOUT, 1)).name, flush=True); os._exit(0)"
    mine = Arena.create(uniform_shape(LAYOUT, 1))
    left = subprocess.run([sys.executable, "-c", leave], capture_output=True, text=True, check=True).stdout.strip()
    assert (own_dir / left).exists()
    assert remove_stale_arenas() == [left]
    assert [path.name for path in own_dir.iterdir()] == [mine.name]
    mine.close()


def test_owner_in_another_pid_namespace_is_alive(own_dir: Path) -> None:
    """Its process id means nothing here, but it holds its lock."""
    owned = Arena.create(uniform_shape(LAYOUT, 1))
    foreign = own_dir / f"kvmesh-999999999-{'e' * 16}"
    (own_dir / owned.name).rename(foreign)
    assert not remove_stale_arenas()
    owned.close()
    gc.collect()
    assert remove_stale_arenas() == [foreign.name]


def test_a_dead_process_1_s_arena_goes_as_the_next_one_is_made() -> None:
    """In each container there lives a process 1: the lock tells whose arena it was."""
    left = SHM_DIR / "kvmesh-1-00000000deadbeef"
    left.write_bytes(b"x")
    Arena.create(uniform_shape(LAYOUT, 1)).close()
    assert not left.exists()


def test_none_is_taken_for_a_dead_one_s_while_it_is_made() -> None:
    def make(_: int) -> bool:
        arena = Arena.create(uniform_shape(LAYOUT, 1))
        try:
            return (SHM_DIR / arena.name).exists()
        finally:
            arena.close()

    with ThreadPoolExecutor(max_workers=8) as pool:
        assert all(pool.map(make, range(400)))


def test_other_files_are_left_alone() -> None:
    path = SHM_DIR / "kvmesh-notes"
    path.write_bytes(b"x")
    try:
        remove_stale_arenas()
        assert path.exists()
    finally:
        path.unlink()


def test_array_is_bytes() -> None:
    owned = Arena.create(uniform_shape(LAYOUT, 1))
    assert owned.array.dtype == np.uint8 and owned.array.flags.c_contiguous
    assert arena_module.HEADER_BYTES % 4096 == 0
    owned.close()


def test_who_reads_lets_go_of_an_arena_that_its_owner_has_left() -> None:
    """A mapping holds the memory, whatever became of the name."""
    attached = AttachedArenas()
    owners = [Arena.create(uniform_shape(LAYOUT, 4)) for _ in range(2)]
    for owner in owners:
        attached.attach(endpoint_of(owner))
    owners[0].close()
    attached.release_unlinked()
    assert owners[0].name not in Path("/proc/self/maps").read_text()
    assert owners[1].name in Path("/proc/self/maps").read_text()
    owners[1].close()
    attached.close()


def endpoint_of(arena: Arena) -> Endpoint:
    return Endpoint(carriers=("shm",), host="", port=0, arena=arena.name, arena_nonce=arena.nonce)
