"""Attacks on ports and files: the data plane's, the store's, and what another user of the machine can reach."""

import asyncio
import contextlib
import itertools
import json
import os
import random
import shutil
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dataplane.blocks.ticket import Ticket, TicketSecrets
from dataplane.protocol.stream import HEADER_BYTES, Header, Kind, Open, encode_frame, encode_header
from schemas import subjects
from schemas.ids import LeaseId, WorkerId
from schemas.kv import PurgeBlocks
from schemas.message import decode, encode
from schemas.subjects import Role
from services.cli.limits import PURGE_TIMEOUT_S
from tests.mesh.attack.mesh import EVIL, Found, Target
from tests.mesh.faults.proxy import listening_ports
from tests.mesh.faults.times import broker_pauses

FRAMES_OF_A_TASK, NUM_THREADS = 500, 16
TIMEOUT_S = 30.0
POLL_S, READS_S = 0.05, 5.0
NOBODY = 65_534
NO_LINGER = struct.pack("ii", 1, 0)
"""Closes at once: a million connections leave no ports waiting."""


async def frames(target: Target, num_frames: int) -> Found:
    """Connect to the workers' data plane without a good ticket, and say one frame each time: junk, headers of any
    length and kind, tickets that are forged, altered or of another mesh."""
    ports = sorted({port for pid in target.pids("prefill", "decode", "store") for port in listening_ports(pid)})
    served = [port for port in ports if await asyncio.to_thread(_is_data_plane, port)]
    assert served, "no worker serves reads"
    found, loop = Found(), asyncio.get_running_loop()
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        tasks = [
            loop.run_in_executor(pool, _knock, served, seed, FRAMES_OF_A_TASK)
            for seed in range(-(-num_frames // FRAMES_OF_A_TASK))
        ]
        for task in asyncio.as_completed(tasks):
            num_tries, got = await task
            found.num_tries += num_tries
            found.got += got
    return found


def _is_data_plane(port: int) -> bool:
    """Say whether this port cuts whoever says what is no frame, without a word (metrics answer over HTTP)."""
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as sock:
        sock.sendall(b"GET / HTTP/1.0\r\n\r\n" + bytes(HEADER_BYTES))
        try:
            return sock.recv(1) == b""
        except ConnectionResetError:
            return True


def _knock(ports: list[int], seed: int, num_frames: int) -> tuple[int, list[str]]:
    rng, got = random.Random(seed), list[str]()
    for _ in range(num_frames):
        said = _any_frame(rng)
        with socket.create_connection(("127.0.0.1", rng.choice(ports)), timeout=TIMEOUT_S) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
            with contextlib.suppress(ConnectionError):
                sock.sendall(said)
                sock.shutdown(socket.SHUT_WR)
                heard = _all_of(sock)
                if heard and heard[3] != Kind.REFUSED:
                    got.append(f"{Kind(heard[3]).name} for {said[:60]!r}")
    return num_frames, got


def _all_of(sock: socket.socket) -> bytes:
    heard = b""
    while (chunk := sock.recv(65_536)) and len(heard) < 1 << 20:
        heard += chunk
    return heard


def _any_frame(rng: random.Random) -> bytes:
    match rng.randrange(6):
        case 0:
            return rng.randbytes(rng.randrange(1, 300))
        case 1:
            length = rng.choice((0, 1, 64, 1 << 20, 2**32 - 1))
            return encode_header(Header(rng.choice(list(Kind)), length=length)) + rng.randbytes(64)
        case 2:
            return encode_frame(Kind.OPEN, _opening(_ticket(rng)))[: rng.randrange(HEADER_BYTES, 400)]
        case 3:
            body = b"[" * rng.randrange(1, 4_000)
            return encode_header(Header(Kind.OPEN, length=len(body))) + body
        case 4:
            whole = bytearray(encode_frame(Kind.OPEN, _opening(_ticket(rng))))
            whole[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
            return bytes(whole)
        case _:
            return encode_frame(Kind.OPEN, _opening(_ticket(rng)))


def _ticket(rng: random.Random) -> str:
    ticket = Ticket(
        lease_id=LeaseId(f"lease-{rng.randrange(100)}"), epoch=rng.randrange(100), nonce="x", incarnation="x",
        holder=WorkerId("prefill-0"), reader=WorkerId(EVIL), tenant="tenant-1",
        expires_at_ms=int(time.monotonic() * 1000) + 60_000,
    )  # fmt: skip
    return TicketSecrets([rng.randbytes(32)]).sign(ticket)


def _opening(ticket: str) -> Open:
    return Open(
        ticket=ticket, nonce="n", fingerprint="x", carrier="tcp", first_token=0, num_tokens=16,
    )  # fmt: skip


_NOBODY_TRIES = """
import json, os
os.setgroups([]); os.setgid({nobody}); os.setuid({nobody})
got = []
for path in {files!r}:
    try:
        with open(path, "rb") as file:
            file.read(1)
    except OSError:
        continue
    got.append(path)
print(json.dumps(got))
"""


async def another_user(target: Target) -> Found:
    """Read the mesh's files, its shared memory and its processes' environment as the user `nobody`."""
    if os.getuid() != 0:
        return Found(1, note="only whoever is root can become nobody: not tried")
    files = await asyncio.to_thread(_files_of, target)
    code = _NOBODY_TRIES.format(nobody=NOBODY, files=files)
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-S", "-c", code], capture_output=True, timeout=TIMEOUT_S, check=True
    )
    got = [f"nobody read {path}" for path in json.loads(done.stdout)]
    return Found(len(files), got + await asyncio.to_thread(_open_to_others, files))


def _open_to_others(files: list[str]) -> list[str]:
    own = [Path(path) for path in files if not path.startswith("/proc")]
    return [f"{path} is not its owner's alone" for path in own if path.exists() and path.stat().st_mode & 0o077]


def _files_of(target: Target) -> list[str]:
    files = [*target.supervisor.keys_dir.parent.rglob("*"), *Path("/dev/shm").glob("kvmesh-*")]
    of_processes = ("environ", "mem", "maps")
    files += [Path(f"/proc/{c.process.pid}/{name}") for c in target.supervisor.children for name in of_processes]
    return [str(path) for path in files if path.is_file()]


async def files_in_the_store(target: Target) -> Found:
    """Put what is no value where the store keeps its values, in their place and beside them: links, pipes, sockets,
    folders, devices, files of other sizes. It may follow and wait for none of them, and a purge leaves them."""
    found, store = Found(), target.supervisor.keys_dir.parents[1] / "store"
    secret = store.parent / "secret"
    secret.write_bytes(b"a secret")
    while not (values := sorted(store.glob("*/??/*.kv"))):  # clients make the store write
        await asyncio.sleep(POLL_S)
    planted = await asyncio.to_thread(_plant, values, secret)
    found.num_tries = len(planted)
    await asyncio.sleep(READS_S)
    for name in target.names("store"):
        async with target.joined(Role.OPERATOR) as operator:
            question = encode(PurgeBlocks())
            answer = await operator.client.request(subjects.PURGE.of(name), question, timeout=PURGE_TIMEOUT_S)
            decode(answer.data, *subjects.PURGE.reply)
    found.got += await asyncio.to_thread(_harvest, planted, secret)
    return found


def _plant(values: list[Path], secret: Path) -> list[Path]:
    """Return the paths of what was put there: every second value has given way to it, and as many stand beside them."""
    places = values[::2] + [path.with_name(f"{os.urandom(24).hex()}.kv") for path in values]
    for path, kind in zip(places, itertools.cycle(_KINDS), strict=False):
        path.unlink(missing_ok=True)
        kind(path, secret)
    return [path for path in places if os.path.lexists(path)]


def _harvest(planted: list[Path], secret: Path) -> list[str]:
    """Remove it again; say what became of it that should not."""
    got = [f"{path} was deleted" for path in planted if not os.path.lexists(path)]
    if secret.read_bytes() != b"a secret":
        got.append("a link was written through")
    for path in planted:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    return got


def _socket(path: Path, _secret: Path) -> None:
    folder = os.open(path.parent, os.O_PATH)
    try:  # the name may be longer than a socket's address
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)


def _folder(path: Path, _secret: Path) -> None:
    path.mkdir()
    (path / "full").touch()


def _device(path: Path, _secret: Path) -> None:
    with contextlib.suppress(PermissionError):  # root alone can make one
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))


_KINDS: tuple[Callable[[Path, Path], None], ...] = (
    lambda path, secret: path.symlink_to(secret),
    lambda path, _secret: path.symlink_to(path),
    lambda path, _secret: os.mkfifo(path),
    _socket,
    _folder,
    _device,
)


async def paused_broker(target: Target, for_s: tuple[float, ...]) -> Found:
    """Stop the broker's process for a while, and let it go on. The clients are this attack's own."""
    pauses = await broker_pauses(target.mesh, for_s, lambda: None)
    gaps_ms = sorted(gap_s * 1e3 for gap_s in pauses.gaps_s) or [0.0]
    note = f"tokens again after {gaps_ms[len(gaps_ms) // 2]:.0f} ms (p50), {gaps_ms[-1]:.0f} ms (longest)"
    return Found(pauses.num_answers, pauses.complaints, note)
