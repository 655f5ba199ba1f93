"""Stand-ins for the base images where no image registry can be reached: Debian by debootstrap, its Python with the
wheels of constraints.txt in place of a package index, its Redis in place of Valkey, and the environment's broker.

What they cannot show: that the images of the names in compose/ exist, and behave as Debian's packages do.
"""

import os
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

from services.bus.embedded import find_server
from tests.compose.docker import LONG_S, ROOT, DockerError, docker, show

OVERRIDE = Path(__file__).with_name("fakes.yaml")
DEBIAN = "kvmesh-fake/debian"
SUITE = "bookworm"
PACKAGES = "python3,python3-venv,ca-certificates,busybox,redis-server"
FOLDER = ROOT / ".kvmesh" / "compose-test"
"""Wheels are kept there for the next time."""

DOCKERFILE = f"""
FROM {DEBIAN} AS python
RUN ln -s /usr/bin/python3 /usr/local/bin/python
RUN printf '[global]\\nno-index = true\\nfind-links = /wheels\\n' > /etc/pip.conf
COPY wheels /wheels

FROM {DEBIAN} AS nats
RUN ln -s /usr/bin/busybox /usr/local/bin/wget
COPY nats-server /usr/local/bin/nats-server

FROM {DEBIAN} AS valkey
RUN for of in server cli; do ln -s /usr/bin/redis-$of /usr/local/bin/valkey-$of; done
RUN install -d -o 999 -g 1000 /data
"""
TARGETS = ("python", "nats", "valkey")


def why_not() -> str:
    """Return why fakes cannot be made here; empty: they can."""
    if f"{sys.version_info.major}.{sys.version_info.minor}" != "3.11":
        return f"fakes need Python 3.11, which is that of Debian {SUITE}"
    if not _torch_is_small():
        return "fakes need an environment whose torch is built without CUDA"
    try:
        docker("image", "inspect", DEBIAN)
    except DockerError:
        if shutil.which("debootstrap") is None or os.geteuid() != 0:
            return "no image registry can be reached, and fakes need debootstrap and root"
    return ""


def make() -> None:
    """Build `kvmesh-fake/{python,nats,valkey}`. Raises DockerError."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    _fetch_wheels(FOLDER / "wheels")
    shutil.copy(find_server(), FOLDER / "nats-server")
    (FOLDER / "Dockerfile").write_text(DOCKERFILE)
    try:
        docker("image", "inspect", DEBIAN)
    except DockerError:
        _import_debian(FOLDER / "debian")
    for target in TARGETS:
        show("docker", "build", "--quiet", "--target", target, "--tag", f"kvmesh-fake/{target}", str(FOLDER))


def _torch_is_small() -> bool:
    import torch

    return torch.version.cuda is None


def _fetch_wheels(folder: Path) -> None:
    """Have pip fetch or build, as this machine is set up for it, the wheels of what the image installs: with the very
    torch that is here. Not all that it installs is published as a wheel."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    requirements = [
        *project["project"]["dependencies"],
        *project["build-system"]["requires"],
        f"torch=={version('torch')}",
        "async-timeout",  # which valkey's client wants of Debian's Python, 3.11.2
    ]
    options = ("--quiet", "--progress-bar", "on", "--prefer-binary", "-c", str(ROOT / "constraints.txt"))
    show(sys.executable, "-m", "pip", "wheel", *options, "-w", str(folder), *requirements)


def _import_debian(root: Path) -> None:
    """Make the image that all fakes begin with."""
    shutil.rmtree(root, ignore_errors=True)
    show("debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(root))
    with subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE) as tar:
        done = subprocess.run(["docker", "import", "-", DEBIAN], stdin=tar.stdout, timeout=LONG_S, check=False)
    shutil.rmtree(root)
    if done.returncode or tar.returncode:
        raise DockerError(f"docker import of {DEBIAN} failed")
