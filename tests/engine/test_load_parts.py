"""What a worker is made of, on the CPU and on a card that is a fake one."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from dataplane.blocks.layout import ArenaShape
from dataplane.cards.arena import CardArena
from dataplane.cards.card import CardError
from dataplane.memory.arena import SHM_DIR, Arena
from schemas.ids import WorkerId
from services.bench.drive.make_checkpoint import make_random_checkpoint
from services.config import EngineConfig, MeshConfig, ModelConfig, StoreConfig, WorkerConfig, with_device
from services.engine.checkpoint import layout_for, read_checkpoint
from services.errors import UserError
from services.gateway.service import load_model
from services.store.load import load_store
from services.worker.parts import WorkerParts, load_parts
from tests.engine.quiet import NO_CALLBACKS
from tests.plane.fake_card import Fabric, FakeCard


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_random_checkpoint(tmp_path_factory.mktemp("model") / "tiny", dtype="bfloat16"))


class Made:
    """Stands in for a card and for the engine on it, and notes what they were asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.checked: list[int] = []
        self.engines: list[dict[str, Any]] = []
        self.failure: Exception | None = None
        self.card = FakeCard(fabric=Fabric())
        on_card = "services.engine.torch_engine.on_card"
        monkeypatch.setattr(f"{on_card}.check_card", self.checked.append)
        monkeypatch.setattr(f"{on_card}.CardStream", lambda device, mark: SimpleNamespace(source=mark.__self__))
        monkeypatch.setattr(f"{on_card}.torch.from_dlpack", lambda exported: exported)
        monkeypatch.setattr(f"{on_card}.load_engine", self._load)
        monkeypatch.setattr(f"{on_card}.compute_largest", self._compute_largest)
        monkeypatch.setattr("dataplane.cards.factory.CupyCard", lambda _: self.card)

    def _load(self, checkpoint: object, **arguments: Any) -> SimpleNamespace:
        self.engines.append(arguments)
        return SimpleNamespace(close=lambda: None)

    def _compute_largest(self, *_: object) -> None:
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    return Made(monkeypatch)


def config_of(model: str, device: str, **settings: Any) -> MeshConfig:
    worker = WorkerConfig(device=device, kv_bytes=1 << 20, **settings)
    store = StoreConfig(memory_bytes=1 << 20)
    return MeshConfig(
        ticket_secrets=("s" * 32,), tenant_seed="s" * 32, model=ModelConfig(path=model), worker=worker, store=store
    )


def load(model: str, device: str, **settings: Any) -> WorkerParts:
    return load_parts(config_of(model, device, **settings), "decode", WorkerId("decode-0"))


def arenas() -> set[Path]:
    return set(SHM_DIR.glob(f"kvmesh-{os.getpid()}-*"))


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_without_a_card_all_is_as_it_was(model: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.engine.devices.has_driver", lambda: False)
    parts = load(model, device)
    try:
        assert isinstance(parts.arena, Arena) and parts.arena.num_bytes == parts.shape.arena_bytes
        assert (parts.info.device, parts.shape.layout.dtype) == ("cpu", "float32")
    finally:
        parts.make_engine(NO_CALLBACKS).close()
        parts.arena.close()


@pytest.mark.parametrize("engine", [EngineConfig(), EngineConfig(name="vllm", kv_format="a")])
def test_a_worker_that_does_not_fit_takes_nothing(
    model: str, engine: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.worker.parts.available_bytes", lambda: 128 << 20)
    config = msgspec.structs.replace(config_of(model, "cpu", block_size=32), engine=engine)
    before = arenas()
    with pytest.raises(UserError, match=r"1 worker\(s\) need about .* and 0\.1 are free: lower --kv-mib"):
        load_parts(config, "decode", WorkerId("decode-0"))
    assert arenas() == before


def test_a_store_that_does_not_fit_takes_nothing(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.store.load.available_bytes", lambda: 1 << 19)
    with pytest.raises(UserError, match=r"\(--memory-gib\) = 0\.000977 GiB, and 0\.000488 are free: lower it"):
        load_store(config_of(model, "cpu"), "store-0")


def test_on_a_card_the_arena_lies_there_and_the_engine_writes_into_it(model: str, made: Made) -> None:
    before = arenas()
    parts = load(model, "cuda:3")
    try:
        assert isinstance(parts.arena, CardArena)
        assert parts.info.device == f"cuda:3 {made.card.name}"
        assert parts.shape.layout.dtype == "bfloat16", "the checkpoint's own"
        assert parts.arena.num_bytes == parts.shape.arena_bytes
        [arguments] = made.engines
        shape: ArenaShape = arguments["shape"]
        assert (shape, arguments["card"].source) == (parts.shape, parts.arena)
        assert np.shares_memory(arguments["arena_buffer"], parts.arena.exported)
        assert made.checked == [3]
    finally:
        parts.arena.close()
    assert arenas() == before


@pytest.mark.parametrize("mesh_device", ["cpu", "cuda:1"])
@pytest.mark.parametrize("own_device", ["", "cpu", "cuda"])
def test_gateway_store_and_worker_name_the_same_kv(model: str, mesh_device: str, own_device: str, made: Made) -> None:
    """A worker may run elsewhere than mesh.toml says: its blocks are still those that the others ask for."""
    config = config_of(model, mesh_device)
    store = load_store(config, "store-0")
    store.arena.close()
    parts = load_parts(with_device(config, own_device) if own_device else config, "decode", WorkerId("d-0"))
    parts.make_engine(NO_CALLBACKS).close()
    parts.arena.close()
    assert parts.shape.layout.dtype == ("float32" if mesh_device == "cpu" else "bfloat16")
    named = {
        parts.limits.fingerprint,
        load_model(config).layout.fingerprint,
        store.values.contents.shape.layout.fingerprint,
    }
    assert len(named) == 1


@pytest.mark.parametrize("engine", [EngineConfig(), EngineConfig(name="vllm", kv_format="a")])
def test_the_format_of_an_engine_s_kv_is_part_of_its_name(model: str, engine: EngineConfig) -> None:
    config = msgspec.structs.replace(config_of(model, "cpu"), engine=engine)
    store = load_store(config, "store-0")
    store.arena.close()
    layout = layout_for(config, read_checkpoint(model))
    assert load_model(config).layout == store.shape.layout == layout
    assert layout.whole_blocks == (engine.name == "vllm")
    assert (layout.fingerprint == load_model(config_of(model, "cpu")).layout.fingerprint) != layout.whole_blocks


@pytest.mark.parametrize(
    ("carrier", "refusal"),
    [
        ("auto", ""),
        ("tcp", ""),
        ("nccl", "nccl cannot be had: the library is not installed"),
        ("shm", "the carrier shm does not lead from a card"),
    ],
)
def test_only_who_asks_for_a_carrier_that_is_not_there_is_refused(
    model: str, carrier: str, refusal: str, made: Made
) -> None:
    before = arenas()
    made.card.refusal = "the library is not installed"
    if refusal:
        with pytest.raises(UserError, match=refusal):
            load(model, "cuda", carrier=carrier)
    else:
        parts = load(model, "cuda", carrier=carrier)
        parts.arena.close()
    assert arenas() == before


@pytest.mark.parametrize("failure", [UserError("no room for the weights"), RuntimeError("out of memory")])
def test_an_engine_that_cannot_be_made_leaves_nothing_behind(model: str, made: Made, failure: Exception) -> None:
    before = arenas()
    made.failure = failure
    with pytest.raises(type(failure), match=str(failure)):
        load(model, "cuda")
    assert arenas() == before
    assert not any(made.card.opened.values())


def test_a_card_that_fails_is_one_line_that_names_it(model: str, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(num_bytes: int) -> object:
        raise CardError(f"allocate {num_bytes} bytes", "out of memory")

    before = arenas()
    monkeypatch.setattr(made.card, "allocate", allocate)
    with pytest.raises(UserError, match=r"^cuda:1: allocate \d+ bytes: out of memory$"):
        load(model, "cuda:1")
    assert arenas() == before
