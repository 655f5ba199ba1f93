"""What the carriers cost beside the limits of this machine, in one run: `python -m tests.bench.bench_carriers`.

Two processes: this one reads, a child holds KV that is already computed. Cases take turns, so that a noisy neighbour
hits all of them; figures are medians. `--json` prints one object instead of the table.
"""

import argparse
import enum
import importlib.util
import json
import multiprocessing
import socket
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np

from dataplane import limits
from dataplane.blocks.layout import (
    BlockTable,
    BlockTables,
    KVLayout,
    Segment,
    block_ids,
    segments_of,
    uniform_shape,
)
from dataplane.blocks.ticket import Ticket, TicketSecrets
from dataplane.carriers import tcp
from dataplane.carriers.host import HostArena
from dataplane.ends.reader import PlaneReader, ReadRequest
from dataplane.ends.server import PlaneServer, ServerOptions
from dataplane.memory.checksum import FrameHash
from dataplane.memory.codec import WireDtype
from dataplane.protocol.progress import KVProgress
from dataplane.protocol.stream import TransferStats
from schemas.handoff import Endpoint
from schemas.ids import LeaseId, WorkerId

SECRETS = TicketSecrets([b"bench"])
LAYOUT = KVLayout(weights="bench", dtype="bfloat16", num_layers=16, num_kv_heads=8, head_dim=128, block_size=16)
"""A block is 1 MiB: 64 KiB per layer."""
ONE_BLOCK = KVLayout(weights="bench", dtype="bfloat16", num_layers=1, num_kv_heads=8, head_dim=128, block_size=16)
"""A block is 64 KiB."""
TICKET = Ticket(
    lease_id=LeaseId("bench"),
    epoch=1,
    nonce="",
    incarnation="",
    holder=WorkerId("p"),
    reader=WorkerId("d"),
    tenant="",
    expires_at_ms=2**52,
)
SHM_GOAL, TCP_GOAL, ENCRYPTED_GOAL = 0.75, 0.85, 0.85
ONE_BLOCK_GOAL, AT_ONCE_GOAL_US = 2, 80
"""Of one block alone as a multiple of the socket's round trip, and of each of many."""
NUM_AT_ONCE = 64
CIPHER = FrameHash("aes256gcm", bytes(32))


@dataclass
class OneKV:
    """Tokens [0, num_tokens): a `LeasedKV`."""

    tables: BlockTables
    num_tokens: int
    progress: KVProgress
    first_token: int = 0


@dataclass
class OpenGate:
    """Lets everybody read one thing: a `LeaseGate`, and the one `OpenLease` of it."""

    kv: OneKV
    traceparent: str = ""

    def open(self, ticket: Ticket) -> "OpenGate":
        return self

    def give_back(self) -> None:
        pass

    def content_macs(self) -> bytes:
        return b""

    def still_valid(self) -> bool:
        return True

    def started(self) -> None: ...

    def served(self, stats: TransferStats, error: str) -> None: ...


def one_table(num_blocks: int, first_block: int = 0) -> BlockTables:
    return (BlockTable((Segment(first_block, num_blocks),)),)


def scattered(num_blocks: int, seed: int) -> BlockTables:
    """Blocks in no order, as they lie in an engine under load."""
    return (BlockTable(segments_of(np.random.default_rng(seed).permutation(num_blocks).tolist())),)


class Kept(NamedTuple):
    """One thing that the child holds and this process reads: where it lies on either side."""

    layout: KVLayout
    num_blocks: int
    holder: BlockTables
    reader: BlockTables


def kept(num_blocks: int) -> list[Kept]:
    """In the order of IN_A_RUN, ONE and SCATTERED."""
    run, one = one_table(num_blocks), one_table(1)
    return [
        Kept(LAYOUT, num_blocks, run, run),
        Kept(ONE_BLOCK, 4, one, one),
        Kept(LAYOUT, num_blocks, scattered(num_blocks, 3), scattered(num_blocks, 4)),
    ]


IN_A_RUN, ONE, SCATTERED = range(3)


class Mode(enum.IntEnum):
    """How it is served."""

    DIGESTS = 0
    NO_DIGESTS = 1
    ENCRYPTED = 2


OPTIONS = {
    Mode.DIGESTS: ServerOptions(),
    Mode.NO_DIGESTS: ServerOptions(digests=False),
    Mode.ENCRYPTED: ServerOptions(encryption="on"),
}
SERVED = [(carrier, mode) for carrier in ("shm", "tcp") for mode in Mode if (carrier, mode) != ("shm", Mode.ENCRYPTED)]
"""What crosses shared memory is not encrypted."""


def num_tokens_of(kept: Kept) -> int:
    return kept.holder[0].end_block * kept.layout.block_size


@dataclass
class Held:
    """One arena of the child, served in each mode."""

    arena: HostArena
    servers: list[PlaneServer]

    @classmethod
    def make(cls, kept: Kept) -> "Held":
        shape = uniform_shape(kept.layout, kept.num_blocks)
        arena = HostArena.create(shape)
        # Any bytes with a bit of each exponent cleared: what is not finite could not be compressed.
        arena.array[:] = np.random.default_rng(1).integers(0, 256, arena.num_bytes, np.uint8) & 0xBF
        num_tokens = num_tokens_of(kept)
        progress = KVProgress.completed(kept.layout.num_layers, num_tokens)
        gate = OpenGate(OneKV(kept.holder, num_tokens, progress))
        servers = [PlaneServer(arena, shape, gate, SECRETS, OPTIONS[mode]) for mode in Mode]
        for server in servers:
            server.serve_streams()
        return cls(arena, servers)

    def close(self) -> None:
        for server in self.servers:
            server.close()
        self.arena.close()


def hold(control: Connection, num_blocks: int) -> None:
    """The child: hold, serve, and send raw bytes when a byte comes on the raw connection."""
    all_held = [Held.make(each) for each in kept(num_blocks)]
    array = all_held[IN_A_RUN].arena.array
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoints = [[server.endpoint for server in held.servers] for held in all_held]
        control.send((endpoints, listener.getsockname()))
        raw, _ = listener.accept()
        with raw:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while command := raw.recv(1):
                asked = array if command == b"a" else array[: 64 << 10]
                for at in range(0, len(asked), limits.TCP_FRAME_BYTES):
                    raw.sendall(asked[at : at + limits.TCP_FRAME_BYTES])
    for held in all_held:
        held.close()


@dataclass
class Bench:
    """This process's side."""

    num_blocks: int
    endpoints: list[list[Endpoint]]
    raw: socket.socket

    def __post_init__(self) -> None:
        large, small = uniform_shape(LAYOUT, self.num_blocks), uniform_shape(ONE_BLOCK, 4)
        self.large, self.small = HostArena.create(large), HostArena.create(small)
        in_large, in_small = PlaneReader(self.large, large, SECRETS), PlaneReader(self.small, small, SECRETS)
        self.readers = [in_large, in_small, in_large]
        self.kept = kept(self.num_blocks)
        self.source = np.random.default_rng(2).integers(0, 256, self.large.num_bytes, np.uint8)
        self.target = np.zeros_like(self.source)
        self.num_bytes = self.large.num_bytes
        self.pool = ThreadPoolExecutor(limits.MAX_IDLE_PER_HOLDER)

    def copy(self) -> None:
        np.copyto(self.target, self.source)

    def copies(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return where each block's keys and values go and come from, in the order of a frame, where the blocks are
        scattered: what memory allows at best, by one thread."""
        of_block = (self.num_blocks, LAYOUT.block_size, -1)
        order = (block_ids(self.kept[SCATTERED].reader[0].segments), block_ids(self.kept[SCATTERED].holder[0].segments))
        parts = [array.reshape(2 * LAYOUT.num_layers, *of_block) for array in (self.target, self.source)]
        return [
            (parts[0][part, target], parts[1][part, source])
            for part in range(2 * LAYOUT.num_layers)
            for target, source in zip(*order, strict=True)
        ]

    def raw_socket(self, array: np.ndarray, command: bytes) -> None:
        """Sent and received in pieces as large as the carrier's: memory that was just written is still in a cache."""
        self.raw.sendall(command)
        view = memoryview(array)
        while view:
            view = view[self.raw.recv_into(view[: tcp.RECEIVE_BYTES]) :]

    def read(
        self,
        which: int,
        carrier: str,
        mode: Mode,
        wire_dtype: WireDtype = "same",
        tables: BlockTables | None = None,
    ) -> TransferStats:
        kept = self.kept[which]
        request = ReadRequest(
            endpoint=self.endpoints[which][mode],
            ticket=SECRETS.sign(TICKET),
            carrier=carrier,
            tables=tables or kept.reader,
            first_token=0,
            num_tokens=num_tokens_of(kept),
            deadline_s=60,
            wire_dtype=wire_dtype,
        )
        return self.readers[which].read_blocking(request).stats

    def throughput_cases(self) -> dict[str, Callable[[], object]]:
        cases: dict[str, Callable[[], object]] = {
            "memory copy, one thread": self.copy,
            "raw socket": lambda: self.raw_socket(self.large.array, b"a"),
        }
        for carrier, mode in SERVED:
            cases[name(carrier, mode)] = lambda c=carrier, m=mode: self.read(IN_A_RUN, c, m)
        cases["AES-256-GCM alone, one thread"] = lambda: CIPHER.encrypted(1, [self.source], self.target)
        return cases

    def scattered_cases(self) -> dict[str, Callable[[], object]]:
        """The same where every block lies elsewhere: by `name_scattered`."""
        cases: dict[str, Callable[[], object]] = {}
        pairs = self.copies()
        cases[name_scattered("copy")] = lambda: copy_pieces(pairs)
        for carrier in ("shm", "tcp"):
            cases[name_scattered(carrier)] = lambda c=carrier: self.read(SCATTERED, c, Mode.DIGESTS)
        cases[name_scattered("shm without digests")] = lambda: self.read(SCATTERED, "shm", Mode.NO_DIGESTS)
        return cases

    def compressed_cases(self) -> dict[str, Callable[[], TransferStats]]:
        dtypes: tuple[WireDtype, ...] = ("int8", "fp8")
        return {f"tcp, {dtype}": lambda d=dtype: self.read(IN_A_RUN, "tcp", Mode.DIGESTS, d) for dtype in dtypes}

    def latency_cases(self) -> dict[str, Callable[[], object]]:
        small = np.empty(64 << 10, np.uint8)
        cases: dict[str, Callable[[], object]] = {"socket": lambda: self.raw_socket(small, b"b")}
        for carrier in ("shm", "tcp"):
            cases[carrier] = lambda c=carrier: self.read(ONE, c, Mode.DIGESTS)
        return cases

    def many_cases(self) -> dict[str, Callable[[], object]]:
        """One block under each of NUM_AT_ONCE leases, over as many connections at once as a reader keeps."""
        return {carrier: lambda c=carrier: self.read_many(c) for carrier in ("shm", "tcp")}

    def read_many(self, carrier: str) -> None:
        def reads(block: int) -> None:
            for _ in range(NUM_AT_ONCE // limits.MAX_IDLE_PER_HOLDER):
                self.read(ONE, carrier, Mode.DIGESTS, tables=one_table(1, block))

        list(self.pool.map(reads, range(limits.MAX_IDLE_PER_HOLDER)))

    def close(self) -> None:
        self.pool.shutdown()
        self.raw.close()
        for reader in self.readers:
            reader.close()
        self.large.close()
        self.small.close()


def copy_pieces(pairs: list[tuple[np.ndarray, np.ndarray]]) -> None:
    for target, source in pairs:
        np.copyto(target, source)


def name_scattered(what: str) -> str:
    return f"scattered, {what}"


def name(carrier: str, mode: Mode) -> str:
    return f"{carrier}, {mode.name.lower().replace('_', ' ')}"


def measure(cases: Mapping[str, Callable[[], object]], num_rounds: int) -> dict[str, float]:
    """Return each case's median seconds; the first round is not counted."""
    times: dict[str, list[float]] = {case: [] for case in cases}
    for _ in range(num_rounds + 1):
        for case, run in cases.items():
            started = time.perf_counter()
            run()
            times[case].append(time.perf_counter() - started)
    return {case: statistics.median(seconds[1:]) for case, seconds in times.items()}


def hold_for_nixl(control: Connection, num_bytes: int) -> None:
    """A child: register memory with NIXL and let the other end read it."""
    agent, memory = nixl_agent("holder", num_bytes)
    control.send((agent.get_agent_metadata(), memory.ctypes.data))
    control.recv()


def nixl_agent(agent_name: str, num_bytes: int):
    from nixl._api import nixl_agent as make_agent
    from nixl._api import nixl_agent_config

    agent = make_agent(agent_name, nixl_agent_config(backends=["UCX"]))
    memory = np.ones(num_bytes, np.uint8)
    agent.register_memory([(memory.ctypes.data, num_bytes, 0, "")], "DRAM")
    return agent, memory


class NixlSeconds(NamedTuple):
    """Medians: all blocks of 64 KiB in a run, one of them, all where they are scattered."""

    in_a_run: float
    one: float
    scattered: float


def measure_nixl(num_blocks: int, num_rounds: int) -> NixlSeconds | None:
    """Return what NIXL takes, or None where it is not installed.

    Its agents are connected and its memory is registered before the clock starts; it checks no bytes.
    """
    if importlib.util.find_spec("nixl") is None:
        return None
    num_bytes = num_blocks * LAYOUT.block_bytes
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=hold_for_nixl, args=(theirs, num_bytes), daemon=True)
    child.start()
    metadata, remote = ours.recv()
    agent, memory = nixl_agent("reader", num_bytes)
    peer = agent.add_remote_agent(metadata)

    def prepare(targets: Sequence[int], sources: Sequence[int], size: int):
        places = ([(memory.ctypes.data + at, size, 0) for at in targets], [(remote + at, size, 0) for at in sources])
        into, out_of = (agent.get_xfer_descs(side, "DRAM") for side in places)
        return agent.initialize_xfer("READ", into, out_of, peer)

    def read(transfer) -> None:
        state = agent.transfer(transfer)
        while state == "PROC":
            state = agent.check_xfer_state(transfer)
        assert state == "DONE", state

    run, piece = range(0, num_bytes, ONE_BLOCK.block_bytes), LAYOUT.layer_block_bytes // 2
    each = kept(num_blocks)[SCATTERED]
    into, out_of = (
        [(part * num_blocks + block) * piece for part in range(2 * LAYOUT.num_layers) for block in block_ids(segments)]
        for segments in (each.reader[0].segments, each.holder[0].segments)
    )
    everything, one = prepare(run, run, ONE_BLOCK.block_bytes), prepare([0], [0], ONE_BLOCK.block_bytes)
    scattered = prepare(into, out_of, piece)
    seconds = measure({"run": lambda: read(everything), "scattered": lambda: read(scattered)}, num_rounds)
    one_s = measure({"one": lambda: read(one)}, 20 * num_rounds)["one"]
    ours.send("done")
    child.join(30)
    return NixlSeconds(seconds["run"], one_s, seconds["scattered"])


def run(mib: int, num_rounds: int) -> dict[str, object]:
    """Return the figures: GiB/s by case, microseconds by case, and the ratios that have goals."""
    num_blocks = mib * (1 << 20) // LAYOUT.block_bytes
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=hold, args=(theirs, num_blocks), daemon=True)
    child.start()
    endpoints, raw_address = ours.recv()
    raw = socket.create_connection(raw_address)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    bench = Bench(num_blocks, endpoints, raw)
    compressed = bench.compressed_cases()
    cases = bench.throughput_cases() | bench.scattered_cases() | compressed
    seconds = measure(cases, num_rounds)
    wire_bytes = {case: read().num_wire_bytes for case, read in compressed.items()}
    latency = measure(bench.latency_cases(), 20 * num_rounds)
    in_a_row = {case: measure({case: run}, 20 * num_rounds)[case] for case, run in bench.latency_cases().items()}
    of_many = measure(bench.many_cases(), 2 * num_rounds)
    bench.close()
    child.join(30)
    speed = {case: bench.num_bytes / 2**30 / s for case, s in seconds.items()}
    wire_speed = {case: num_bytes / 2**30 / seconds[case] for case, num_bytes in wire_bytes.items()}
    nixl = measure_nixl(num_blocks, num_rounds)
    if nixl is not None:
        speed["NIXL, defaults"] = bench.num_bytes / 2**30 / nixl.in_a_run
        speed[name_scattered("NIXL")] = bench.num_bytes / 2**30 / nixl.scattered
        latency["NIXL"] = nixl.one
    expected = 1 / (1 / speed[name("tcp", Mode.NO_DIGESTS)] + 1 / speed["AES-256-GCM alone, one thread"])
    unproved = speed[name_scattered("shm without digests")]
    scattered: dict[str, float | None] = {
        "shm_of_copy": speed[name_scattered("shm")] / speed[name_scattered("copy")],
        "shm_without_digests_of_copy": unproved / speed[name_scattered("copy")],
        "tcp_of_socket": speed[name_scattered("tcp")] / speed["raw socket"],
        "shm_of_nixl": nixl and speed[name_scattered("shm")] / speed[name_scattered("NIXL")],
    }
    return {
        "mib": mib,
        "gib_per_s": speed,
        "wire_gib_per_s": wire_speed,
        "one_block_us": {case: s * 1e6 for case, s in latency.items()},
        "one_block_in_a_row_us": {case: s * 1e6 for case, s in in_a_row.items()},
        "one_of_many_blocks_us": {case: s / NUM_AT_ONCE * 1e6 for case, s in of_many.items()},
        "one_block_of_socket": {case: s / latency["socket"] for case, s in latency.items() if case != "socket"},
        "shm_to_memory_copy": speed[name("shm", Mode.DIGESTS)] / speed["memory copy, one thread"],
        "shm_proved_to_unproved": speed[name("shm", Mode.DIGESTS)] / speed[name("shm", Mode.NO_DIGESTS)],
        "tcp_to_raw_socket": speed[name("tcp", Mode.DIGESTS)] / speed["raw socket"],
        "tcp_encrypted_to_expected": speed[name("tcp", Mode.ENCRYPTED)] / expected,
        "scattered": scattered,
        "nixl_installed": nixl is not None,
    }


def table(figures: dict) -> str:
    lines = [f"{figures['mib']} MiB of KV, two processes, medians", ""]
    lines += [f"  {case:36}{speed:8.2f} GiB/s" for case, speed in figures["gib_per_s"].items()]
    lines += ["", "of these on the wire"]
    lines += [f"  {case:36}{speed:8.2f} GiB/s" for case, speed in figures["wire_gib_per_s"].items()]
    lines += ["", "one block of 64 KiB; ours with ticket, lease and commit, on a connection that is kept"]
    lines += [f"  {case:36}{micros:8.0f} µs" for case, micros in figures["one_block_us"].items()]
    lines += [
        f"  {f'{case}, one after the other':36}{micros:8.0f} µs"
        for case, micros in figures["one_block_in_a_row_us"].items()
    ]
    lines += [
        f"  {f'{case}, each of {NUM_AT_ONCE}':36}{micros:8.0f} µs  (goal {AT_ONCE_GOAL_US})"
        for case, micros in figures["one_of_many_blocks_us"].items()
    ]
    lines += [
        f"  {f'{case} / socket':36}{ratio:8.1f}  (goal {ONE_BLOCK_GOAL})"
        for case, ratio in figures["one_block_of_socket"].items()
    ]
    shm, tcp = figures["shm_to_memory_copy"], figures["tcp_to_raw_socket"]
    encrypted = figures["tcp_encrypted_to_expected"]
    lines += [
        "",
        f"  shm / memory copy  {shm:.2f}  (goal {SHM_GOAL})",
        f"  tcp / raw socket   {tcp:.2f}  (goal {TCP_GOAL})",
        f"  tcp encrypted / (in the clear, then AES)  {encrypted:.2f}  (goal {ENCRYPTED_GOAL})",
        "",
        "scattered, of the same pieces copied in the same order by one thread (tcp: of the raw socket)",
        *(f"  {what:36}{ratio:8.2f}" for what, ratio in figures["scattered"].items() if ratio is not None),
    ]
    if not figures["nixl_installed"]:
        lines += ["", "NIXL is not installed here: `pip install nixl` puts its figures beside."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    figures = run(arguments.mib, arguments.rounds)
    sys.stdout.write(json.dumps(figures, indent=1) + "\n" if arguments.json else table(figures))


if __name__ == "__main__":
    main()
