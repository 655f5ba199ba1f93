"""`make compose-test`: the mesh of compose/compose.yaml in real containers, as a person would use it, and worse.

Tempo, Prometheus and Grafana are left out: they are other people's images, and their files have tests of their own.
"""

import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.compose import fakes
from tests.compose.docker import COMPOSE_FILE, HA_FILE, IMAGE, DockerError, Project, docker, has_image, why_not
from tests.compose.mesh import CheckFailedError, Mesh

PROJECT = "kvmesh-compose-test"
SERVICES = ("gateway", "directory", "prefill", "decode")
"""What is asked for; what they depend on comes along."""
HEALTHY_S = 90.0

console = Console(highlight=False, soft_wrap=True)


def main() -> int:
    """Return the exit code: 0 where nothing can be tried, too."""
    if reason := why_not():
        return skip(f"there is no Docker to try it with ({reason})")
    overrides: list[Path] = []
    if not all(map(has_image, base_images())):
        if reason := fakes.why_not():
            return skip(reason)
        step("fakes for the base images: no registry can be reached", fakes.make)
        overrides = [fakes.OVERRIDE]
    port = free_port()
    env = {**os.environ, "KVMESH_PORT": str(port), "KVMESH_IMAGE": IMAGE, "OTEL_EXPORTER_OTLP_ENDPOINT": ""}
    project = Project(PROJECT, overrides, {name: value for name, value in env.items() if name != "KVMESH_MODEL"})
    project.show("--profile", "*", "down", "--volumes", "--remove-orphans")  # what a broken run has left
    try:
        url = f"http://127.0.0.1:{port}"
        check(project, Mesh(project, url))
        of_three = project.with_file(HA_FILE)
        check_broker_of_three(of_three, Mesh(of_three, url))
    except (CheckFailedError, DockerError) as error:
        console.print(project.run("logs", "--no-color", "--tail", "20"), markup=False)
        console.print(f"[red]failed:[/red] {error}")
        return 1
    finally:
        project.show("--profile", "*", "down", "--volumes", "--remove-orphans")
        docker("image", "rm", "--force", IMAGE)
    console.print("compose-test passed")
    return 0


def check(project: Project, mesh: Mesh) -> None:
    """Use the mesh from its first build to its end. Raises CheckFailedError, DockerError."""
    step("build", lambda: project.show("build", "config"))
    step("up", lambda: project.show("up", "--detach", *SERVICES))
    step(f"all of it healthy in {HEALTHY_S:.0f} s", lambda: mesh.wait_healthy(HEALTHY_S))
    step("only the gateway is published, on loopback; nobody is root or can write", mesh.check_hardened)
    step("a completion, split over two containers, has the right answer", mesh.check_answer)

    def scale() -> None:
        project.show("up", "--detach", "--no-recreate", "--scale", "decode=4", *SERVICES)
        mesh.wait_fleet(num_prefill=2, num_decode=4)

    step("--scale decode=4: all four are in the fleet", scale)
    for role in ("decode", "prefill"):
        kill = f"kill a {role} worker at work: no request fails, no answer is wrong, it comes back"
        step(kill, lambda role=role: mesh.survive(role))
    step("the profile `store`: it is in the fleet", lambda: add_store(project, mesh))
    check_down(project)


def check_broker_of_three(project: Project, mesh: Mesh) -> None:
    """Use the mesh with a broker of three servers. Raises CheckFailedError, DockerError."""
    step("compose/ha.yaml: up", lambda: project.show("up", "--detach", *SERVICES))
    step(f"all of it healthy in {HEALTHY_S:.0f} s", lambda: mesh.wait_healthy(HEALTHY_S))
    for name in ("nats-1", "nats"):
        step(f"kill {name}: no request fails, no answer is wrong", lambda name=name: mesh.survive_broker(name))
    check_down(project)


def check_down(project: Project) -> None:
    step("down", lambda: project.show("--profile", "*", "down", "--volumes"))
    if left := project.left():
        raise CheckFailedError(f"down has left {', '.join(left)}")


def add_store(project: Project, mesh: Mesh) -> None:
    project.show("--profile", "store", "up", "--detach", "--no-recreate", "--scale", "decode=4", *SERVICES, "store")
    mesh.wait_healthy(HEALTHY_S)
    mesh.wait_fleet(num_prefill=2, num_decode=4, num_store=1)


def step(name: str, act: Callable[[], Any]) -> None:
    """Say what is being tried, and what it took."""
    console.print(f"[bold]{name}[/bold] …")
    started = time.monotonic()
    act()
    console.print(f"[green]ok[/green] {name} ({time.monotonic() - started:.1f} s)")


def skip(reason: str) -> int:
    console.print(f"compose-test skipped: {reason}")
    return 0


def base_images() -> list[str]:
    """Return the images that are not built here, and that fakes could replace."""
    dockerfile = COMPOSE_FILE.with_name("Dockerfile").read_text()
    python = dockerfile.split("ARG PYTHON_IMAGE=", 1)[1].split()[0]
    images = [line.split()[1] for line in COMPOSE_FILE.read_text().splitlines() if line.strip().startswith("image: ")]
    return [python, *(image for image in images if image.split(":")[0] in ("nats", "valkey/valkey"))]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())
