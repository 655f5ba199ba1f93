"""Files and folders that nobody else on the machine may read: a prompt can be read from its KV, its trace, a log line.

The only place of the services that makes either.
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import IO, Literal

PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700


def private_folder(folder: Path, *, is_ours: bool = False) -> Path:
    """Return the folder, made for its owner alone where it is missing. `is_ours`: nobody else keeps anything there, so
    one that is there already is narrowed. Raises OSError."""
    folder.parent.mkdir(parents=True, exist_ok=True, mode=PRIVATE_FOLDER)
    folder.mkdir(exist_ok=True, mode=PRIVATE_FOLDER)
    if is_ours:
        folder.chmod(PRIVATE_FOLDER)
    return folder


def open_private(path: Path, mode: Literal["ab", "wb"]) -> IO[bytes]:
    """Open a file to write or append to; it is its owner's alone, also where it was there before. Raises OSError."""
    start = os.O_APPEND if mode == "ab" else os.O_TRUNC
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | start, PRIVATE_FILE)
    os.fchmod(descriptor, PRIVATE_FILE)
    return os.fdopen(descriptor, mode)


def create_private(path: Path, content: bytes) -> None:
    """Write a new file for its owner alone. Raises FileExistsError where there is anything of this name, be it a link;
    OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE_FILE)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def replace_private(path: Path, content: bytes) -> None:
    """Write a file for its owner alone in place of what has its name, be it a link: whole, or not at all. Raises
    OSError."""
    whole = path.with_name(f"{path.name}.new")
    whole.unlink(missing_ok=True)
    create_private(whole, content)
    whole.replace(path)


def write_private(path: Path, content: str | bytes) -> None:
    """Write a whole file for its owner alone. Raises OSError."""
    with open_private(path, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def locked(path: Path) -> Generator[None]:
    """Be the only one who changes a file while the block runs; another process waits. Raises OSError."""
    with open_private(path.with_name(f".{path.name}.lock"), "ab") as lock:  # the file itself is replaced
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def cut_log(path: Path, max_bytes: int) -> None:
    """Where a log that others append to has grown over `max_bytes`, keep it beside as `NAME.1`, if there is room, in
    place of the one before, and let it go on empty. Raises OSError."""
    if path.stat().st_size > max_bytes:
        with contextlib.suppress(OSError), path.open("rb") as log, open_private(Path(f"{path}.1"), "wb") as kept:
            shutil.copyfileobj(log, kept)
        os.truncate(path, 0)
