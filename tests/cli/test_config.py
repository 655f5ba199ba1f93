"""Which device a worker runs on, and which dtype a mesh has: it follows from mesh.toml alone, for every service."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from dataplane.addresses import ports_of
from services.cli.flags import launch_of
from services.config import (
    EngineConfig,
    MeshConfig,
    ModelConfig,
    WorkerConfig,
    check_endpoint,
    dtype_of,
    load_config,
    parse_devices,
    relations_of,
    with_device,
    write_config,
)
from services.engine import devices
from services.engine.devices import Cards, card_of, check_carrier, check_driver, plan_devices
from services.errors import UserError


def mesh(device: str = "auto", dtype: str = "auto") -> MeshConfig:
    return MeshConfig(model=ModelConfig(dtype=dtype), worker=WorkerConfig(device=device))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("device", "dtype", "resolved"),
    [
        ("auto", "auto", "float32"),
        ("cpu", "auto", "float32"),
        ("cuda", "auto", "bfloat16"),
        ("cuda:3", "auto", "bfloat16"),
        ("cpu", "checkpoint", "bfloat16"),
        ("cuda", "float32", "float32"),
        ("cpu", "float16", "float16"),
    ],
)
def test_the_dtype_follows_from_the_file(device: str, dtype: str, resolved: str) -> None:
    assert dtype_of(mesh(device, dtype), "bfloat16") == resolved


@pytest.mark.parametrize("mesh_device", ["auto", "cpu", "cuda"])
@pytest.mark.parametrize("own_device", ["cpu", "cuda:1", "auto"])
def test_a_worker_on_another_device_has_the_dtype_of_the_others(mesh_device: str, own_device: str) -> None:
    """Gateways and stores read the file and know nothing of the worker's flag."""
    config = mesh(mesh_device)
    own = with_device(config, own_device)
    assert own.worker.device == own_device
    assert dtype_of(own, "bfloat16") == dtype_of(config, "bfloat16")


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:-1", "CUDA", "cuda:0,cuda:1", "", "cuda:1000"])
def test_what_is_no_device_is_refused(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="a device is"):
        with_device(mesh(), device)
    path = tmp_path / "mesh.toml"
    path.write_text(f'[worker]\ndevice = "{device}"\n')
    with pytest.raises(UserError, match="a device is"):
        load_config(path)
    if device:
        path.write_text("")
        monkeypatch.setenv("KVMESH_DEVICE", device)
        with pytest.raises(UserError, match=f"KVMESH_DEVICE = '{device}': a device is"):
            load_config(path)


def test_the_environment_names_the_device_of_the_whole_mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in containers: what writes their mesh.toml hears of it, and all of them read that file."""
    written = tmp_path / "mesh.toml"
    monkeypatch.setenv("KVMESH_DEVICE", "cuda")
    (tmp_path / "template.toml").write_text("")
    write_config(load_config(tmp_path / "template.toml"), written)
    monkeypatch.delenv("KVMESH_DEVICE")
    config = load_config(written)
    assert (config.worker.device, dtype_of(config, "bfloat16")) == ("cuda", "bfloat16")


def test_where_kv_is_read_can_be_told_by_the_environment_and_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text('[worker]\nplane_host = "0.0.0.0"\nplane_ports = "7000-7015"\n')
    monkeypatch.setenv("KVMESH_ADVERTISE_HOST", "10.0.0.7")
    worker = load_config(path).worker
    assert (worker.advertise_host, worker.plane_ports) == ("10.0.0.7", "7000-7015")
    monkeypatch.setenv("KVMESH_ADVERTISE_HOST", "0.0.0.0")
    with pytest.raises(UserError, match=r"KVMESH_ADVERTISE_HOST = '0.0.0.0': .* nowhere that others could connect"):
        load_config(path)


@pytest.mark.parametrize("ports", ["0", "7000-", "-7000", "7015-7000", "65535-65536", "7000,7001", "some", "0-7"])
def test_what_is_no_range_of_ports(ports: str, tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text(f'[worker]\nplane_ports = "{ports}"\n')
    with pytest.raises(UserError, match="ports are like 7000-7015"):
        load_config(path)


def test_a_range_of_ports() -> None:
    assert list(ports_of("7000-7002")) == [7000, 7001, 7002]
    assert (list(ports_of("7000")), list(ports_of(""))) == ([7000], [0])


VLLM = '[engine]\nname = "vllm"\nkv_format = "vllm0.32.0/CPU_ATTN/LBHNC/vec/float32"\n'


def test_an_engine_is_written_and_read(tmp_path: Path) -> None:
    """Its arguments are whatever it takes."""
    path = tmp_path / "mesh.toml"
    path.write_text("")
    assert load_config(path).engine == EngineConfig()
    args = {"enforce_eager": False, "quantization": "fp8", "a b": [1, 2.5, {"x": "y"}], "empty": [], "deep": {"z": {}}}
    engine = EngineConfig(name="vllm", kv_format='v/"1"', kv_bytes=1 << 40, args=args)
    write_config(MeshConfig(engine=engine), path)
    assert load_config(path).engine == engine


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[engine]\nname = "vllm"', 'engine.name = "vllm" needs an engine.kv_format'),
        ('[engine]\nname = "llama"', "Invalid enum value 'llama'"),
        ('[engine]\nkv_format = "x"', 'engine.kv_format, kv_bytes and args are for engine.name = "vllm"'),
        ("[engine]\nargs = {dtype = 1}", 'engine.kv_format, kv_bytes and args are for engine.name = "vllm"'),
        ("[engine]\nkv_bytes = 1", 'engine.kv_format, kv_bytes and args are for engine.name = "vllm"'),
        ("[engine]\nprocess = false\nspares = 1", "engine.spares need engine.process = true"),
        ("[engine]\nstep_timeout_s = 0", "Expected `float` >= 0.1 - at `$.engine.step_timeout_s`"),
        (f"{VLLM}kv_bytes = -1", "Expected `int` >= 0 - at `$.engine.kv_bytes`"),
        (f"{VLLM}args = {{scale = nan}}", "engine.args: nan cannot be written in TOML"),
        (f"{VLLM}arg = {{}}", "unknown field `arg`"),
        (f'{VLLM}[worker]\nwire_dtype = "int8"', 'set worker.wire_dtype = "same"'),
        (f'{VLLM}[worker]\nwire_dtype = "auto"', 'worker.wire_dtype = "auto" compresses token by token'),
    ],
)
def test_an_engine_that_cannot_be_is_one_line(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        load_config(path)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_an_argument_without_a_value_is_refused() -> None:
    """As JSON on a command line may have it."""
    with pytest.raises(ValueError, match=r"engine\.args: None cannot be written in TOML: leave it out"):
        EngineConfig(name="vllm", kv_format="f", args={"a": [{"b": None}]})


BAD_RELATIONS = [
    (
        "[scheduler]\nping_interval_ms = 700",
        "2 × scheduler.ping_interval_ms = 1400",
        "scheduler.suspect_after_ms = 600",
    ),
    ("[scheduler]\nsuspect_after_ms = 3000", "scheduler.suspect_after_ms = 3000", "scheduler.silent_after_ms = 3000"),
    (
        "[scheduler]\nsilent_after_ms = 900\n[worker]\nfence_after_ms = 500",
        "4 × times.presence.beat_interval_ms = 1200",
        "scheduler.silent_after_ms = 900",
    ),
    ("[worker]\nfence_after_ms = 3500", "worker.fence_after_ms = 3500", "scheduler.silent_after_ms = 3000"),
    (
        "[worker]\nfence_after_ms = 3500\n[scheduler]\nsilent_after_ms = 9000",
        "worker.fence_after_ms = 3500",
        "gateway.worker_silent_ms = 3000",
    ),
    ("[worker]\nfence_after_ms = 100", "times.worker.tick_ms = 100", "worker.fence_after_ms = 100"),
    ("[worker]\nlease_ms = 50", "times.worker.tick_ms = 100", "worker.lease_ms = 50"),
    (
        "[scheduler]\nsuspect_after_ms = 4000\nsilent_after_ms = 9000",
        "scheduler.suspect_after_ms = 4000",
        "gateway.worker_silent_ms = 3000",
    ),
    ("[gateway]\nprogress_after_ms = 3000", "gateway.progress_after_ms = 3000", "gateway.worker_silent_ms = 3000"),
    ("[gateway]\naccept_timeout_s = 4.5", "gateway.accept_timeout_s = 4.5", "gateway.worker_silent_ms = 3000"),
    (
        "[gateway]\naccept_timeout_s = 1.0\nworker_silent_ms = 1200\n[worker]\nfence_after_ms = 500\n",
        "times.presence.partitioned_after_ms = 1500",
        "gateway.worker_silent_ms = 1200",
    ),
    ("[gateway]\nrequest_timeout_s = 1.5", "gateway.accept_timeout_s = 2", "gateway.request_timeout_s = 1.5"),
    ("[store]\ntimeout_ms = 2000", "store.timeout_ms = 2000", "times.worker.lease_answer_ms = 2000"),
    (
        "[times.presence]\npartitioned_after_ms = 1200",
        "4 × times.presence.beat_interval_ms = 1200",
        "times.presence.partitioned_after_ms = 1200",
    ),
    (
        "[times.directory]\nforget_after_ms = 500",
        "4 × times.presence.beat_interval_ms = 1200",
        "times.directory.forget_after_ms = 500",
    ),
    ("[times.plane]\nmax_idle_s = 30.0", "times.plane.max_idle_s = 30", "times.plane.holder_idle_s = 30"),
]


@pytest.mark.parametrize(("text", "shorter", "longer"), BAD_RELATIONS)
def test_times_that_do_not_fit_are_refused_by_an_error_that_names_both(
    text: str, shorter: str, longer: str, tmp_path: Path
) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text(text.replace("worker_silent_ms = 1200", "worker_silent_ms = 1200\nprogress_after_ms = 500"))
    with pytest.raises(UserError) as caught:
        load_config(path)
    line = str(caught.value)
    assert f"{shorter}" in line and f"must be shorter than {longer}" in line and "\n" not in line
    lower, higher = (part.split(" = ")[0].split()[-1] for part in (shorter, longer))
    assert line.endswith(f"Lower {lower} or raise {higher}")


def test_every_relation_between_times_has_a_bad_file() -> None:
    relations = relations_of(MeshConfig())
    assert len(relations) == len(BAD_RELATIONS)
    for relation in relations:
        relation.check_order()


def test_a_scale_multiplies_every_wait_and_no_pace(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text("[times]\nscale = 20\n[times.gateway]\nhead_s = 3.0\n[worker]\nlease_ms = 10_000\n")
    config, plain = load_config(path), MeshConfig()
    assert (config.times.gateway.head_s, config.worker.lease_ms) == (60.0, 200_000)
    assert config.times.plane.connect_s == 20 * plain.times.plane.connect_s
    assert config.times.presence.recover_ms == 20 * plain.times.presence.recover_ms
    assert config.store.timeout_ms == 20 * plain.store.timeout_ms
    assert config.times.presence.beat_interval_ms == plain.times.presence.beat_interval_ms
    assert config.scheduler.ping_interval_ms == plain.scheduler.ping_interval_ms
    assert config.gateway.request_timeout_s == plain.gateway.request_timeout_s, "it is promised to clients"
    write_config(config, path)
    assert load_config(path) == config, "it is multiplied once"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("scale = 0", "Expected `float` >= 0.1 - at `$.times.scale`"),
        ("scale = 0.3", "at times.scale = 0.3: 2 × scheduler.ping_interval_ms = 400 must be shorter than"),
        ("[times.gateway]\nhead_s = -1.0", "Expected `float` >= 0.0 - at `$.times.gateway.head_s`"),
        ("[times.worker]\ntick_ms = 0", "Expected `int` >= 1 - at `$.times.worker.tick_ms`"),
        ("[times.worker]\ntick = 1", "unknown field `tick` - at `$.times.worker`"),
    ],
)
def test_times_that_cannot_be_are_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text(f"[times]\n{text}\n")
    with pytest.raises(UserError) as caught:
        load_config(path)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_the_environment_may_set_the_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text("[times]\nscale = 2\n")
    monkeypatch.setenv("KVMESH_TIME_SCALE", "10")
    assert load_config(path).times.gateway.head_s == 10 * MeshConfig().times.gateway.head_s
    monkeypatch.setenv("KVMESH_TIME_SCALE", "fast")
    with pytest.raises(UserError, match="KVMESH_TIME_SCALE = 'fast': Expected `float`"):
        load_config(path)


def test_a_part_that_is_replaced_is_checked_as_well() -> None:
    config = MeshConfig()
    with pytest.raises(ValueError, match=r"worker\.fence_after_ms = 9000 .* scheduler\.silent_after_ms = 3000"):
        msgspec.structs.replace(config, worker=msgspec.structs.replace(config.worker, fence_after_ms=9_000))


@pytest.mark.parametrize(
    ("asked", "num_cards", "planned"),
    [
        ("auto", 0, ["cpu", "cpu", "cpu"]),
        ("auto", 2, ["cuda:0", "cuda:1", "cuda:0"]),
        ("cuda", 1, ["cuda:0", "cuda:0", "cuda:0"]),
        ("cuda", 8, ["cuda:0", "cuda:1", "cuda:2"]),
        ("cuda", 0, ["cuda:0", "cuda:0", "cuda:0"]),
        ("cuda:5", 2, ["cuda:5", "cuda:5", "cuda:5"]),
        ("cuda:1,cuda:0", 2, ["cuda:1", "cuda:0", "cuda:1"]),
        ("cuda:0, cpu", 1, ["cuda:0", "cpu", "cuda:0"]),
        ("cpu", 4, ["cpu", "cpu", "cpu"]),
    ],
)
def test_devices_are_dealt_out(asked: str, num_cards: int, planned: list[str]) -> None:
    assert plan_devices(parse_devices(asked), Cards(num_cards), 3) == planned


@pytest.mark.parametrize("asked", ["", "cuda:0,,cpu", "cuda:0;cpu", "tpu"])
def test_a_list_with_what_is_no_device_is_refused(asked: str) -> None:
    with pytest.raises(UserError, match=f"^--device '{asked}': a device is .*; one for all workers, or one each"):
        launch_of({"device": asked})


@pytest.mark.parametrize(
    ("carrier", "planned", "word"),
    [
        ("cuda", ["cpu", "cpu"], "--device cuda"),
        ("cuda", ["cuda:0", "cpu"], ""),
        ("nccl", ["cuda:0", "cuda:0", "cpu"], "cuda:0,cuda:1"),
        ("nccl", ["cuda:0", "cuda:1"], ""),
        ("auto", ["cpu"], ""),
        ("shm", ["cpu"], ""),
        ("shm", ["cuda:0", "cpu"], "take auto or tcp"),
        ("tcp", ["cuda:0"], ""),
    ],
)
def test_a_carrier_that_leads_nowhere_is_refused(carrier: Any, planned: list[str], word: str) -> None:
    if not word:
        check_carrier(carrier, planned)
        return
    with pytest.raises(UserError, match=word):
        check_carrier(carrier, planned)


@pytest.mark.parametrize("planned", [["cuda:0"], ["cpu", "cuda:77"]])
def test_a_card_without_a_driver_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, planned: list[str]
) -> None:
    monkeypatch.setattr(devices, "has_driver", lambda: False)
    with pytest.raises(UserError, match="--device cpu"):
        check_driver(planned)
    check_driver(["cpu"])
    monkeypatch.setattr(devices, "has_driver", lambda: True)
    check_driver(planned)


def test_a_worker_looks_for_a_card_only_where_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []

    def look() -> Cards:
        looked.append("looked")
        return Cards(2)

    monkeypatch.setattr(devices, "usable_cards", look)
    monkeypatch.setattr(devices, "has_driver", lambda: True)
    assert [card_of(device) for device in ("cpu", "cuda", "cuda:0", "cuda:7")] == [None, 0, 0, 7]
    assert looked == []
    assert card_of("auto") == 0 and looked == ["looked"]
    monkeypatch.setattr(devices, "has_driver", lambda: False)
    assert card_of("auto") is None and looked == ["looked"]


def test_a_card_that_cannot_be_used_is_not_silently_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(devices, "has_driver", lambda: True)
    monkeypatch.setattr(devices, "usable_cards", lambda: Cards(reason="cupy not installed"))
    assert card_of("auto") is None
    assert "cupy not installed" in caplog.text


async def test_without_a_driver_nothing_is_started_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "has_driver", lambda: False)
    monkeypatch.setattr(devices.asyncio, "create_subprocess_exec", None)
    assert await devices.probe_cards() == Cards()


async def test_with_a_driver_a_process_of_its_own_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here it says what it says of this machine; that it says anything shows that the two understand each other."""
    monkeypatch.setattr(devices, "has_driver", lambda: True)
    assert await devices.probe_cards() == devices.usable_cards()


@pytest.mark.parametrize("url", ["foo", "localhost:4318", "http://", "http://host:port", "ftp://host", "http://h:0"])
def test_an_endpoint_that_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(UserError, match="--otlp"):
        check_endpoint(url)


@pytest.mark.parametrize("url", ["", "http://127.0.0.1:4318", "https://otel.example.com", "http://[::1]:4318/"])
def test_an_endpoint_is_an_http_server_or_none(url: str) -> None:
    check_endpoint(url)
