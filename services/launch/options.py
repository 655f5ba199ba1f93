"""What `kvmesh up` is to start."""

from typing import Annotated

import msgspec

from services.config import MeshConfig, Port, parse_devices
from services.settings import Flag

JOINS = "joins"
"""The service where other machines join."""
WORKER_ROLES = ("prefill", "decode", "aggregated")
Workers = Annotated[int, msgspec.Meta(ge=0, le=64)]
Others = Annotated[int, msgspec.Meta(ge=1, le=16)]


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """How many there are of each service, where they run, their broker, and the configuration that all of them read.

    What only a start can know is filled in there: addresses, ports, keys, threads for 0, the engine's format of KV.
    """

    num_prefill: Annotated[Workers, Flag("--prefill", "Prefill workers.")] = 1
    num_decode: Annotated[Workers, Flag("--decode", "Decode workers.")] = 1
    num_aggregated: Annotated[
        Workers, Flag("--aggregated", "Workers that do both, instead of the other two: no split.")
    ] = 0
    num_schedulers: Annotated[Others, Flag("--schedulers", "Schedulers.")] = 1
    num_directories: Annotated[Others, Flag("--directories", "Directories.")] = 1
    num_gateways: Annotated[Others, Flag("--gateways", "Gateways, on ports one after another.")] = 1
    devices: Annotated[
        tuple[str, ...],
        Flag(
            "--device",
            "auto, cpu, cuda (cards in turn), cuda:N, or a list dealt out to the workers.",
            parse=parse_devices,
            shown="KVMESH_DEVICE or auto",
        ),
    ] = ()
    """Dealt out in the order of `services`."""
    nats: Annotated[
        str, Flag("--nats", "`embedded`, or the URL of a running server.", shown="KVMESH_NATS_URL or embedded")
    ] = ""
    nats_port: Annotated[
        Port, Flag("--nats-port", "Port of the embedded server; 0 finds one, another at each start.")
    ] = 0
    keys: Annotated[str, Flag("--keys", "With a server of your own: what `kvmesh bus-config DIR` has written.")] = ""
    attach: Annotated[
        bool, Flag("--attach", "No workers and no gateway: a holder of KV that `vllm serve` attaches to.")
    ] = False
    join_port: Annotated[
        Port, Flag("--join-port", "Port where other machines join, as 7843; left out, nobody does.", shown="")
    ] = 0
    host: str = ""
    """This machine has joined a mesh by this name: it has workers and gateways, called by it, and nothing else."""
    store: Annotated[str, Flag("--store", "A KV store, if any: memory, disk, redis://… or valkey://….")] = ""
    config: MeshConfig = MeshConfig()

    @property
    def services(self) -> list[tuple[str, str]]:
        """(role, name) of every process, in starting order."""
        if self.host:
            return [(role, f"{role}-{self.host}-{n}") for role, count in self._counts for n in range(count)]
        pairs = [*_named("scheduler", self.num_schedulers), *_named("directory", self.num_directories)]
        if self.attach:
            return [*pairs, ("attach", "attach-0")]
        if self.store:
            pairs.append(("store", "store-0"))
        for role, count in self._counts[:-1]:
            pairs += [(role, f"{role}-{number}") for number in range(count)]
        pairs += _named("gateway", self.num_gateways)
        return [*pairs, (JOINS, JOINS)] if self.join_port else pairs

    @property
    def _counts(self) -> list[tuple[str, int]]:
        counts = (self.num_prefill, self.num_decode, self.num_aggregated, self.num_gateways)
        return list(zip((*WORKER_ROLES, "gateway"), counts, strict=True))

    @property
    def workers(self) -> list[str]:
        """The names of the workers, in starting order."""
        return [name for role, name in self.services if role in WORKER_ROLES]


def _named(role: str, count: int) -> list[tuple[str, str]]:
    """Return (role, name) for `count` services. The first is named like its role."""
    return [(role, role), *((role, f"{role}-{number}") for number in range(1, count))]
