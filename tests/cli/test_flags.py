"""The flags of `kvmesh up`: each sets the field that declares it, and what is left out is that field's default."""

from pathlib import Path
from typing import Any, get_args

import pytest
from typer.testing import CliRunner

from services.cli import up
from services.cli.app import app
from services.cli.flags import FLAGS, launch_of
from services.config import MeshConfig, apply_environment, load_config, write_config
from services.errors import UserError
from services.launch.options import Launch
from services.settings import changed, settings_of

KEYS = "keys.toml"
TEXTS: dict[str, tuple[str, Any]] = {
    "device": ("cuda:1,cpu", ("cuda:1", "cpu")),
    "tenants": (KEYS, {"key-a": "a"}),
    "hosts": ("a.example, b.example", ("a.example", "b.example")),
    "cors_origins": ("https://a.example,*", ("https://a.example", "*")),
    "engine_args": ('{"quantization": "awq"}', {"quantization": "awq"}),
    "host": ("127.0.0.9", "127.0.0.9"),
    "tls_cert": ("/own.crt", "/own.crt"),
    "tls_key": ("/own.key", "/own.key"),
    "store_dir": ("/store", "/store"),
    "plane_host": ("127.0.0.9", "127.0.0.9"),
    "plane_ports": ("7000-7015", "7000-7015"),
    "advertise_host": ("10.0.0.7", "10.0.0.7"),
    "socket": ("/attach.sock", "/attach.sock"),
    "otlp": ("http://127.0.0.1:4318", "http://127.0.0.1:4318"),
}
"""What is typed, and what it means."""
BESIDE = {
    "tls_cert": ["--tls-key", "/own.key"],
    "tls_key": ["--tls-cert", "/own.crt"],
    "engine_kv_mib": ["--engine", "vllm"],
    "engine_args": ["--engine", "vllm"],
}
"""What some need beside them."""


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Type words behind `kvmesh up`, and return what would be started."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / KEYS).write_text('key-a = "a"')
    taken: list[Launch] = []
    monkeypatch.setattr(up, "run_up", lambda launch: taken.append(launch) or 0)

    def type_words(*words: str) -> Launch:
        ran = CliRunner().invoke(app, ["up", *words])
        if isinstance(ran.exception, UserError):
            raise ran.exception
        assert ran.exit_code == 0, ran.output
        return taken.pop()

    return type_words


def test_without_flags_all_is_as_it_is_declared(typed: Any) -> None:
    assert typed() == Launch()


@pytest.mark.parametrize("name", FLAGS)
def test_each_flag_sets_the_field_that_declares_it(name: str, typed: Any, tmp_path: Path) -> None:
    setting, flag = FLAGS[name]
    switches = flag.name.split("/")
    if isinstance(setting.default, bool):
        words, meant = [switches[1] if setting.default else switches[0]], not setting.default
    elif name in TEXTS:
        words, meant = [flag.name, TEXTS[name][0]], TEXTS[name][1]
    elif choices := [choice for choice in get_args(setting.plain_type) if choice != setting.default]:
        words, meant = [flag.name, choices[-1]], choices[-1]
    elif isinstance(setting.default, float):
        words, meant = [flag.name, "0.5"], 0.5
    elif isinstance(setting.default, int):
        words, meant = [flag.name, "16"], 16 * flag.unit
    else:
        words, meant = [flag.name, "disk"], "disk"
    launch = typed(*words, *BESIDE.get(name, []))
    found = {each.path: each.default for each in settings_of(launch)}
    assert found[setting.path] == meant != setting.default
    if setting.path.startswith("config."):
        format_of_vllm = {"engine.kv_format": "f"} if launch.config.engine.name == "vllm" else {}
        config = changed(launch.config, format_of_vllm)
        write_config(config, tmp_path / "mesh.toml")
        assert load_config(tmp_path / "mesh.toml") == config, "a service reads what was typed"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--aggregated", "2", "--decode", "1"], "leave out --prefill and --decode"),
        (["--aggregated", "2", "--split", "always"], "leave out --split always"),
        (["--prefill", "0"], "--prefill and --decode are 1 or more"),
        (["--tenants", "none.toml"], "--tenants 'none.toml': cannot read none.toml: No such file"),
        (
            ["--spare-engines", "1", "--engine-kv-mib", "1"],
            'engine.kv_format, kv_bytes and args are for engine.name = "vllm"',
        ),
    ],
)
def test_flags_that_do_not_fit_are_refused(words: list[str], said: str, typed: Any) -> None:
    with pytest.raises(UserError) as caught:
        typed(*words)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--kv-mib", "0"), ("--store-mib", "0"), ("--port", "70000"), ("--sample-ratio", "2"), ("--token-budget", "15")],
)
def test_a_flag_has_the_bounds_of_its_field(flag: str, value: str) -> None:
    ran = CliRunner().invoke(app, ["up", flag, value])
    assert ran.exit_code == 2 and f"Invalid value for '{flag}': Input should be" in ran.output


def test_aggregated_workers_take_the_place_of_the_others(typed: Any) -> None:
    assert typed("--aggregated", "2").workers == ["aggregated-0", "aggregated-1"]


@pytest.mark.parametrize("setting", [each for each in settings_of(MeshConfig()) if each.variable], ids=lambda e: e.path)
def test_each_variable_sets_the_field_that_declares_it(setting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text, meant = {str: ("cuda:7", "cuda:7"), int: ("9", 9), float: ("0.5", 0.5)}[setting.plain_type]
    monkeypatch.setenv(setting.variable, text)
    assert apply_environment(MeshConfig()) == changed(MeshConfig(), {setting.path: meant})
    if setting.plain_type is not str:
        monkeypatch.setenv(setting.variable, "-7")
        with pytest.raises(UserError, match=f"^{setting.variable} = '-7': Expected"):
            apply_environment(MeshConfig())


def test_a_field_that_there_is_not_is_not_set() -> None:
    for path in ("worker.kv", "works.kv_bytes", "kv"):
        with pytest.raises((AttributeError, TypeError)):
            changed(MeshConfig(), {path: 1})


def test_the_default_host_is_an_address_of_this_machine() -> None:
    assert launch_of({}).config.gateway.host in ("127.0.0.1", "::1")
