"""What the services write is its owner's alone, and their logs are bounded."""

import logging
import stat
from pathlib import Path

import pytest

from services.config import MeshConfig, write_config
from services.files import cut_log, open_private, private_folder, write_private
from services.runtime import ASKED_FOR, MAX_LOG_KINDS, OneOfAKind
from services.store.disk import DiskTier
from services.telemetry.export import FileExporter
from tests.store.rig import key_at


def rights(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(autouse=True)
def anybody_may_read() -> None:
    """As most machines are set up; the tests must not rely on a stricter one."""
    import os

    os.umask(0o022)


def test_a_file_and_a_folder_are_narrow_and_narrowed_where_they_were_wide(
    tmp_path: Path,
) -> None:
    new, wide = tmp_path / "a" / "b", tmp_path / "wide"
    assert rights(private_folder(new)) == 0o700 and rights(new.parent) == 0o700
    wide.mkdir(mode=0o755)
    assert rights(private_folder(wide)) == 0o755, "somebody else may keep something there"
    assert rights(private_folder(wide, is_ours=True)) == 0o700
    write_private(new / "text", "é")
    assert (new / "text").read_text() == "é" and rights(new / "text") == 0o600
    (wide / "old").write_text("before")
    with open_private(wide / "old", "ab") as file:
        assert rights(wide / "old") == 0o600
        file.write(b" and after")
    assert (wide / "old").read_text() == "before and after"


def test_a_stores_folder_is_narrowed_and_its_files_are_narrow(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir(mode=0o755)
    tier = DiskTier(tmp_path, "m", 4)
    tier.write({key_at(1): b"abcd", key_at(2): b"efgh"})
    tier.close()
    found = list((tmp_path / "m").rglob("*"))
    assert {rights(path) for path in found if path.is_dir()} == {0o700} == {rights(tmp_path / "m")}
    assert {rights(path) for path in found if path.is_file()} == {0o600} and len(found) == 4


def test_configuration_and_traces(tmp_path: Path) -> None:
    write_config(MeshConfig(), tmp_path / "mesh.toml")
    exporter = FileExporter(tmp_path / "traces", "w")
    exporter.export([])
    (trace,) = (tmp_path / "traces").iterdir()
    assert rights(tmp_path / "mesh.toml") == rights(trace) == 0o600 and rights(tmp_path / "traces") == 0o700


def test_a_log_goes_on_empty_where_it_has_grown_and_the_one_before_is_kept(tmp_path: Path) -> None:
    log = tmp_path / "decode-0.log"
    with open_private(log, "ab") as writer:
        for line in (b"first", b"second"):
            writer.write(line * 4)
            writer.flush()
            cut_log(log, 100)
            assert log.stat().st_size, "it is short"
            cut_log(log, 10)
            assert (log.stat().st_size, (tmp_path / "decode-0.log.1").read_bytes()) == (0, line * 4)
        assert (tmp_path / "decode-0.log.1").stat().st_mode & 0o777 == 0o600


def test_one_line_of_a_kind_passes_in_ten_seconds_and_the_next_has_their_number() -> None:
    now_s, said = 0.0, list[str]()
    log = logging.Logger("l")
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    handler.addFilter(OneOfAKind(lambda: now_s))
    log.addHandler(handler)
    for now_s in (0.0, 1.0, 9.9, 10.1, 10.2, 30.0):
        log.warning("%s is at %.0f%%", "decode-0", now_s)
    for number in range(2 * MAX_LOG_KINDS):
        log.warning(f"kind {number}")
    assert said[:3] == [
        "decode-0 is at 0%",
        "decode-0 is at 10% (and 2 more like it before)",
        "decode-0 is at 30% (and 1 more like it before)",
    ]
    assert len(said) == 3 + 2 * MAX_LOG_KINDS
    for _ in range(3):
        log.warning("what was asked for", extra=ASKED_FOR)
    assert said[-3:] == ["what was asked for"] * 3
