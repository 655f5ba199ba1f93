"""Machines of a test: namespaces of network, host name and shared memory, on one switch. A link is taken down at the
switch, as a cable is pulled: the machine itself notices nothing."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

NETWORK = "10.213.78"
SWITCH = "switch"
KVMESH = [sys.executable, "-m", "services.cli.main"]
TOOLS = ("ip", "nsenter", "unshare", "iptables")


class Machines:
    """By name, each with an address of its own and a folder."""

    def __init__(self, pids: dict[str, int], root: Path) -> None:
        self._pids = pids
        self.names = [name for name in pids if name != SWITCH]
        self.address = {name: f"{NETWORK}.{number}" for number, name in enumerate(self.names, start=1)}
        self.root = root

    def command(self, name: str, *command: str) -> list[str]:
        """Return a command as it is run on a machine."""
        return ["nsenter", "--target", str(self._pids[name]), "--net", "--uts", "--mount", *command]

    def run(self, name: str, *command: str) -> str:
        """Run it, and return what it says."""
        done = subprocess.run(self.command(name, *command), capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def kvmesh(self, name: str, *words: str, first_on_path: Path | None = None) -> "subprocess.CompletedProcess[str]":
        """Run a command of kvmesh in the machine's folder. `first_on_path`: where Python looks for packages first."""
        environment = self.environment(name)
        if first_on_path is not None:
            environment["PYTHONPATH"] = f"{first_on_path}:{environment['PYTHONPATH']}"
        command = self.command(name, *KVMESH, *words)
        return subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment, cwd=self.folder(name)
        )

    def folder(self, name: str) -> Path:
        found = self.root / name
        found.mkdir(exist_ok=True)
        return found

    def environment(self, name: str) -> dict[str, str]:
        python_path = str(Path(__file__).parents[2])
        return {**os.environ, "KVMESH_STATE_DIR": str(self.folder(name) / "state"), "PYTHONPATH": python_path}

    @contextlib.contextmanager
    def running(self, name: str, *words: str, log: str = "") -> Iterator["subprocess.Popen[bytes]"]:
        """Run a command of kvmesh while the block runs. What it says goes to the machine's folder."""
        with (self.folder(name) / f"{log or words[0]}.log").open("wb") as file, subprocess.Popen(
            self.command(name, *KVMESH, *words), stdout=file, stderr=file, env=self.environment(name),
            cwd=self.folder(name),
        ) as process:  # fmt: skip
            try:
                yield process
            finally:
                process.terminate()
                try:
                    process.wait(120)
                except subprocess.TimeoutExpired:
                    process.kill()

    def said(self, name: str, log: str) -> str:
        """Return what a command has said so far."""
        return (self.folder(name) / f"{log}.log").read_text()

    def unplug(self, name: str) -> None:
        """Pull a machine's cable."""
        self.run(SWITCH, "ip", "link", "set", f"to-{name}", "down")

    def plug(self, name: str) -> None:
        self.run(SWITCH, "ip", "link", "set", f"to-{name}", "up")

    def close_port(self, name: str, port: int) -> None:
        """Have a machine's firewall drop what comes to a port."""
        self.run(name, "iptables", "-A", "INPUT", "-p", "tcp", "--dport", str(port), "-j", "DROP")

    def open_ports(self, name: str) -> None:
        self.run(name, "iptables", "-F", "INPUT")


@contextlib.contextmanager
def machines(root: Path, *names: str) -> Iterator[Machines]:
    """Make machines that end with the block. Skips the test where none may be made."""
    if missing := [tool for tool in TOOLS if not shutil.which(tool)]:
        pytest.skip(f"there is no {', '.join(missing)}")
    with contextlib.ExitStack() as stack:
        pids = {name: stack.enter_context(_machine(name)) for name in (SWITCH, *names)}
        found = Machines(pids, root)
        found.run(SWITCH, "ip", "link", "add", "br0", "type", "bridge")
        found.run(SWITCH, "ip", "link", "set", "br0", "up")
        for name in names:
            link = ("ip", "link", "add", "lan0", "netns", str(pids[name]), "type", "veth", "peer", "name", f"to-{name}")
            subprocess.run([*link, "netns", str(pids[SWITCH])], check=True, capture_output=True)
            found.run(SWITCH, "ip", "link", "set", f"to-{name}", "master", "br0")
            found.plug(name)
            found.run(name, "ip", "addr", "add", f"{found.address[name]}/24", "dev", "lan0")
            found.run(name, "ip", "link", "set", "lan0", "up")
            found.run(name, "ip", "link", "set", "lo", "up")
        yield found


@contextlib.contextmanager
def _machine(name: str) -> Iterator[int]:
    made = f"mount -t tmpfs tmpfs /dev/shm && hostname {name} && echo made && exec sleep 7200"
    command = ["unshare", "--net", "--uts", "--mount", "sh", "-c", made]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as held:
        assert held.stdout is not None
        if held.stdout.readline() != b"made\n":
            pytest.skip("no namespaces may be made here")
        try:
            yield held.pid
        finally:
            held.kill()
