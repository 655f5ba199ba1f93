"""Attacks on ports and files: the data plane's, the gateway's, and what another user of the machine can reach."""

import asyncio
import contextlib
import json
import os
import random
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from dataplane.blocks.ticket import Ticket, TicketSecrets
from dataplane.memory.extent import NO_HEADS
from dataplane.protocol.stream import HEADER_BYTES, Header, Kind, Open, encode_frame, encode_header
from schemas.ids import LeaseId, WorkerId
from tests.mesh.attack.mesh import EVIL, Found, Target
from tests.mesh.faults.proxy import listening_ports
from tests.mesh.faults.times import broker_pauses

FRAMES_OF_A_TASK, NUM_THREADS = 500, 16
TIMEOUT_S = 30.0
NOBODY = 65_534
BODY_BYTES = 20 << 20
MEMORY_GROWTH_BYTES = 400 << 20
"""Four bodies of 20 MB took 15 GB once; what is allowed here is what bodies in flight may take, and slack."""
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
        heads=NO_HEADS,
    )  # fmt: skip


async def http_strangers(target: Target) -> Found:
    """Ask the gateway without a key, from another site's page, for another host, and for absurd numbers."""
    found, key = Found(), {"Authorization": f"Bearer {target.supervisor.tenants[0]}"}
    body = {"model": target.mesh.model, "prompt": "Q", "max_tokens": 1}
    huge = json.dumps(body)[:-1]
    no_key: Iterable[dict[str, str]] = (
        {}, {"Authorization": "Bearer"}, {"Authorization": "Bearer tenant"}, {"Authorization": "Bearer tenant-00"},
        {"Authorization": "Basic dGVuYW50LTA="}, {"Authorization": "Bearer tenant-0 x"},
    )  # fmt: skip
    asked: list[tuple[str, dict[str, str], str, set[int]]] = [
        *((f"key {headers}", headers, json.dumps(body), {401}) for headers in no_key),
        ("text/plain", key | {"Content-Type": "text/plain"}, json.dumps(body), {415}),
        ("another Host", key | {"Host": "evil.example.org"}, json.dumps(body), {421}),
        *((f"{name} of 10^400", key, f'{huge}, "{name}": {10**400}}}', {400}) for name in ("n", "top_k", "seed")),
        ("depth", key, '{"model":' + "[" * 50_000, {400}),
        ("no JSON", key, "\x00", {400}),
    ]
    for url in target.supervisor.urls:
        for name, headers, content, allowed in asked:
            sent = {"Content-Type": "application/json"} | headers
            answer = await target.mesh.http.post(f"{url}/v1/completions", content=content, headers=sent)
            found.num_tries += 1
            if answer.status_code not in allowed:
                found.got.append(f"{answer.status_code} for {name}")
        for path in ("/metrics", "/../mesh.toml", "/v1/models/../../mesh.toml"):
            answer = await target.mesh.http.get(url + path)
            found.num_tries += 1
            if answer.status_code == 200:
                found.got.append(f"200 for {path}")
    return found


async def large_bodies(target: Target) -> Found:
    """Four prompts of 20 MB at once with a key, thirty without one."""
    found, pid = Found(), target.pids("gateway")[0]
    url, before = target.supervisor.urls[0], _peak_bytes(pid)
    text = json.dumps({"model": target.mesh.model, "prompt": "x" * BODY_BYTES, "max_tokens": 1})
    key = {"Authorization": f"Bearer {target.supervisor.tenants[0]}", "Content-Type": "application/json"}
    other = {"Authorization": "Bearer none", "Content-Type": "application/json"}

    async def post(headers: dict[str, str]) -> int:
        found.num_tries += 1
        try:
            answer = await target.mesh.http.post(f"{url}/v1/completions", content=text, headers=headers)
        except httpx.TransportError:  # it was answered and cut before all was sent
            return 0
        return answer.status_code

    codes = await asyncio.gather(*(post(key) for _ in range(4)), *(post(other) for _ in range(30)))
    grown = _peak_bytes(pid) - before
    found.got += [f"a body of 20 MB: {code}" for code in codes if code in (200, 500)]
    if grown > MEMORY_GROWTH_BYTES:
        found.got.append(f"the gateway grew by {grown >> 20} MiB")
    found.note = f"memory +{grown >> 20} MiB"
    return found


def _peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


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


async def paused_broker(target: Target, for_s: tuple[float, ...]) -> Found:
    """Stop the broker's process for a while, and let it go on. The clients are this attack's own."""
    pauses = await broker_pauses(target.mesh, for_s, lambda: None)
    gaps_ms = sorted(gap_s * 1e3 for gap_s in pauses.gaps_s) or [0.0]
    note = f"tokens again after {gaps_ms[len(gaps_ms) // 2]:.0f} ms (p50), {gaps_ms[-1]:.0f} ms (longest)"
    return Found(pauses.num_answers, pauses.complaints, note)
