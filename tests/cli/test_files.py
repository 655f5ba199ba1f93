"""What the services write is its owner's alone."""

import stat
from pathlib import Path

import pytest

from services.config import MeshConfig, write_config
from services.files import open_private, private_folder, write_private
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
