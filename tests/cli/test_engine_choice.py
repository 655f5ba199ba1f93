"""What `kvmesh up --engine` makes of mesh.toml, and what it refuses before anything is started."""

import importlib.util
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from services.cli.app import app
from services.cli.flags import launch_of
from services.config import EngineConfig, MeshConfig, WorkerConfig
from services.engine.checkpoint import Checkpoint, layout_for, read_checkpoint
from services.engine.demo_model import DEMO_MODEL_DIR
from services.engine.memory import check_memory
from services.engine.vllm_engine import formats
from services.engine.vllm_engine.formats import installed_version
from services.errors import UserError
from services.launch.engine_choice import in_place_of_the_files, with_engine
from services.launch.serve import Overrides, run_service

MIB = 1 << 20


def vllm(worker: WorkerConfig | None = None, **engine: Any) -> MeshConfig:
    return MeshConfig(worker=worker or WorkerConfig(), engine=EngineConfig(name="vllm", **engine))


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return read_checkpoint(str(DEMO_MODEL_DIR))


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "installed_version", lambda: "9.9")
    monkeypatch.setattr(formats, "_cpu_flags", frozenset)
    monkeypatch.setattr(formats.platform, "machine", lambda: "x86_64")


def test_vllm_has_its_block_size_and_format(checkpoint: Checkpoint) -> None:
    config = with_engine(vllm(args={"enforce_eager": False}), checkpoint)
    assert (config.worker.block_size, config.engine.name) == (32, "vllm")
    assert config.engine.kv_format.startswith("vllm9.9/CPU_ATTN/LBHNC/vec/float32/")
    assert config.engine.args == {"enforce_eager": False}
    plain = with_engine(vllm(), checkpoint)
    assert plain.engine.kv_format == "vllm9.9/CPU_ATTN/LBHNC/vec/float32", "what its arguments change is other KV"
    assert layout_for(config, checkpoint).whole_blocks
    assert layout_for(config, checkpoint).fingerprint != layout_for(MeshConfig(), checkpoint).fingerprint


def test_our_own_engine_stays_as_it_was(checkpoint: Checkpoint) -> None:
    assert with_engine(MeshConfig(), checkpoint) == MeshConfig(worker=WorkerConfig(block_size=16))
    own = MeshConfig(worker=WorkerConfig(block_size=64))
    assert with_engine(own, checkpoint) == own
    for flags in ({"engine_kv_mib": 1}, {"engine_args": '{"a": 1}'}):
        with pytest.raises(UserError, match=r'kv_bytes and args are for engine\.name = "vllm"'):
            launch_of(flags)


def test_a_service_takes_an_engine_in_place_of_the_file_s(checkpoint: Checkpoint) -> None:
    """`kvmesh serve --engine`: what `kvmesh up` would have written, and back."""
    written = with_engine(vllm(), checkpoint)
    assert in_place_of_the_files(MeshConfig(), "vllm") == written
    assert in_place_of_the_files(written, "vllm") is written
    own = in_place_of_the_files(written, "transformers")
    assert (own.engine.name, own.engine.kv_format, own.worker.block_size) == ("transformers", "", 32)
    larger = MeshConfig(worker=WorkerConfig(block_size=64))
    assert in_place_of_the_files(larger, "vllm").worker.block_size == 64


@pytest.mark.parametrize("role", ["prefill", "store", "gateway"])
def test_serve_says_how_to_get_vllm(role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "installed_version", installed_version)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (tmp_path / "mesh.toml").write_text("")
    with pytest.raises(UserError, match="vLLM is not installed here: run `make vllm`"):
        run_service(role, tmp_path / "mesh.toml", service_id="", overrides=Overrides(engine="vllm"), supervised=False)


def test_what_vllm_cannot_do_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(UserError, match="multiple of 32 tokens: --block-size 48"):
        with_engine(vllm(WorkerConfig(block_size=48)), checkpoint)
    with pytest.raises(UserError, match="wire_dtype"):
        in_place_of_the_files(MeshConfig(worker=WorkerConfig(wire_dtype="int8")), "vllm")
    with pytest.raises(UserError, match=r"engine\.args sets model: that follows from the rest of mesh\.toml"):
        with_engine(vllm(args={"model": "another"}), checkpoint)
    with pytest.raises(UserError, match=r"sets tensor_parallel_size, which is not served \(a worker is one process"):
        with_engine(vllm(args={"tensor_parallel_size": 2}), checkpoint)


def test_memory_is_looked_at_first(checkpoint: Checkpoint) -> None:
    config = with_engine(vllm(WorkerConfig(kv_bytes=512 * MIB)), checkpoint)
    check_memory(config, checkpoint, None, num_workers=2)
    check_memory(config, checkpoint, 4 << 30, num_workers=2)
    with pytest.raises(UserError, match=r"3 .* need about 5\.4 GiB .* vLLM's .* and 4\.0 are free: lower --kv-mib"):
        check_memory(config, checkpoint, 4 << 30, num_workers=3)
    own_pool = msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, kv_bytes=64 * MIB))
    check_memory(own_pool, checkpoint, 3 << 30, num_workers=2)


def test_memory_for_our_own_engine_and_a_store(checkpoint: Checkpoint) -> None:
    config = MeshConfig(worker=WorkerConfig(kv_bytes=512 * MIB))
    check_memory(config, checkpoint, 2 << 30, num_workers=2)
    with pytest.raises(UserError, match=r"4 .* need about 3\.0 GiB \(each has 0\.5 of arena.* and 2\.0 are free"):
        check_memory(config, checkpoint, 2 << 30, num_workers=4)
    with pytest.raises(UserError, match=r"2 .* need .* the store 2\.0\) and 2\.0 are free"):
        check_memory(config, checkpoint, 2 << 30, num_workers=2, store_bytes=2 << 30)
    spared = msgspec.structs.replace(config, engine=EngineConfig(spares=2))
    with pytest.raises(
        UserError, match=r"about 2\.5 GiB .*, 0\.5 of 2 spare engine.*: lower --kv-mib, --spare-engines or"
    ):
        check_memory(spared, checkpoint, 2 << 30, num_workers=2)
    large = msgspec.structs.replace(checkpoint, num_bytes=8 << 30, dtype="bfloat16")
    with pytest.raises(UserError, match=r"1 .* need .* 16\.0 of weights"):
        check_memory(config, large, 12 << 30, num_workers=1)


@pytest.mark.parametrize("text", ["{", "[1]", "3"])
def test_engine_arguments_are_a_json_object(text: str) -> None:
    ran = CliRunner().invoke(app, ["up", "--engine", "vllm", "--engine-args", text])
    assert isinstance(ran.exception, UserError) and "it is a JSON object" in str(ran.exception)
