"""Docker for the check of compose/: whether there is one, and one compose project on it."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
COMPOSE_FILE = ROOT / "compose" / "compose.yaml"
HA_FILE = COMPOSE_FILE.with_name("ha.yaml")
SHORT_S = 120.0
LONG_S = 1_800.0
PROJECT_LABEL = "com.docker.compose.project"


IMAGE = "kvmesh-compose-test"
"""What is built, and removed afterwards."""


class DockerError(Exception):
    """A docker command failed; the message is what it said."""


def docker(*arguments: str, timeout_s: float = SHORT_S, env: Mapping[str, str] | None = None) -> str:
    """Return what a docker command prints. Raises DockerError."""
    command = ["docker", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=env, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DockerError(f"{' '.join(command)}: {error}") from error
    if done.returncode:
        raise DockerError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def show(*command: str, env: Mapping[str, str] | None = None) -> None:
    """Run what takes minutes, with its own progress on the terminal. Raises DockerError."""
    try:
        subprocess.run(command, timeout=LONG_S, env=env, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise DockerError(str(error)) from error


def why_not() -> str:
    """Return why nothing can be tried in containers here; empty: it can."""
    try:
        docker("compose", "version")
        docker("info", "--format", "{{.ServerVersion}}")
    except DockerError as error:
        return str(error).splitlines()[0]
    return ""


def has_image(image: str) -> bool:
    """Whether the image is here, or can be fetched."""
    try:
        docker("image", "inspect", image)
    except DockerError:
        try:
            docker("pull", image, timeout_s=LONG_S)
        except DockerError:
            return False
    return True


class Project:
    """One compose project. `env`: what the files are filled with."""

    def __init__(self, name: str, overrides: Sequence[Path], env: Mapping[str, str]) -> None:
        self.name = name
        self._env, self._overrides = env, overrides
        files = [argument for path in (COMPOSE_FILE, *overrides) for argument in ("--file", str(path))]
        self._compose = ("compose", "--project-name", name, *files)

    def with_file(self, path: Path) -> "Project":
        """Return the same project with one file more."""
        return Project(self.name, [*self._overrides, path], self._env)

    def run(self, *arguments: str, timeout_s: float = SHORT_S) -> str:
        """Return what `docker compose …` prints. Raises DockerError."""
        return docker(*self._compose, *arguments, timeout_s=timeout_s, env=self._env)

    def show(self, *arguments: str) -> None:
        """`docker compose …` with its own progress on the terminal. Raises DockerError."""
        show("docker", *self._compose, *arguments, env=self._env)

    def containers(self) -> list[dict[str, Any]]:
        """Return what `docker inspect` says of every container, those that have ended too."""
        ids = docker("ps", "--all", "--quiet", "--filter", f"label={PROJECT_LABEL}={self.name}").split()
        return json.loads(docker("inspect", *ids)) if ids else []

    def left(self) -> list[str]:
        """Return the containers, networks and volumes that there are of it."""
        of_it = ("--quiet", "--filter", f"label={PROJECT_LABEL}={self.name}")
        kinds = (("ps", "--all"), ("network", "ls"), ("volume", "ls"))
        return [f"{kind[0]} {id}" for kind in kinds for id in docker(*kind, *of_it).split()]
