"""The mesh in containers, as its client and its operator see it."""

import json
import threading
import time
from collections.abc import Callable
from random import Random
from typing import Any

import httpx
import torch

from services.engine.demo_model import DEMO_MODEL_DIR
from tests.compose.docker import IMAGE, DockerError, Project, docker

WAIT_S = 120.0
POLL_S = 0.5
NUM_CLIENTS = 4
REQUEST_TIMEOUT_S = 120.0

QUESTION = "The code of Ada Brook is 7412. The code of Max Reed is 3055. Q: What is the code of Ada Brook? A:"
ANSWER = "7412"
PROMPT_TOKENS = 400
ANSWER_TOKENS = 64
VOCAB = (5, 500)

KILL_THE_SERVICE = """
import os, pathlib, signal
for process in pathlib.Path("/proc").glob("[0-9]*"):
    if process.name != "1" and b"serve" in (process / "cmdline").read_bytes().split(b"\\0"):
        os.kill(int(process.name), signal.SIGKILL)
"""
"""From the inside: what `docker kill` ends, docker takes for stopped by a person and does not start again."""


class CheckFailedError(Exception):
    """The mesh does not do what it promises."""


class Mesh:
    """A running compose project."""

    def __init__(self, project: Project, url: str) -> None:
        self._project = project
        self._client = httpx.Client(base_url=url, timeout=REQUEST_TIMEOUT_S)

    def complete(self, prompt: str | list[int], **fields: object) -> dict[str, Any]:
        """Return a greedy completion. Raises CheckFailedError for anything but a 200."""
        body = {"model": "demo_model", "prompt": prompt, "max_tokens": 16, "temperature": 0} | fields
        try:
            answer = self._client.post("/v1/completions", json=body)
        except httpx.HTTPError as error:
            raise CheckFailedError(f"a completion failed: {error!r}") from error
        if answer.status_code != 200:
            raise CheckFailedError(f"a completion was answered {answer.status_code}: {answer.text}")
        return answer.json()

    def wait_healthy(self, timeout_s: float) -> None:
        """Wait until every container that stays up is healthy, and the gateway could place a request."""

        def unhealthy() -> list[str]:
            states = {container["Name"]: container["State"] for container in self._project.containers()}
            return [
                f"{name} is {state['Status']}, {state.get('Health', {}).get('Status', 'without a health check')}"
                for name, state in states.items()
                if not _is_well(state)
            ] or ([] if states else ["there is no container"])

        _wait_until(lambda: not unhealthy(), timeout_s, lambda: "; ".join(unhealthy()))

    def check_hardened(self) -> None:
        """What compose.yaml says of rights and ports holds of the containers that run."""
        published = {
            f"{bound['HostIp']} {port}"
            for container in self._project.containers()
            for port, bounds in container["NetworkSettings"]["Ports"].items()
            for bound in bounds or ()
        }
        _expect(published == {"127.0.0.1 8000/tcp"}, f"published is {published}")
        for container in self._project.containers():
            if container["State"]["Running"]:
                writes = "touch /here 2>/dev/null && echo written; id -u"
                said = docker("exec", container["Id"], "sh", "-c", writes).split()
                _expect(said not in (["0"], []) and len(said) == 1, f"{container['Name']} says {said}")

    def check_answer(self) -> None:
        """The demo model knows the answer, and two containers have worked on it."""
        answer = self.complete(QUESTION)
        usage = answer["usage"]["kvmesh"]
        _expect(ANSWER in answer["choices"][0]["text"], f"the answer is {answer['choices'][0]['text']!r}")
        _expect(usage["prefill_worker"].startswith("prefill-") and usage["transferred_tokens"] > 0, f"usage is {usage}")

    def fleet(self) -> list[dict[str, Any]]:
        """Return the workers' loads as the scheduler knows them; none while it does not answer."""
        name = self._project.name
        within = ("--network", f"{name}_default", "--volume", f"{name}_keys-people:/people:ro", IMAGE)
        status = ("kvmesh", "status", "--nats", "tls://nats:4222", "--creds", "/people/observer.creds", "--json")
        try:
            return json.loads(docker("run", "--rm", *within, *status))["workers"]
        except DockerError:
            return []

    def wait_fleet(self, *, num_prefill: int, num_decode: int, num_store: int = 0) -> None:
        """Wait until so many workers are ready, each under a name of its own that its container has given."""

        def ready() -> dict[str, str]:
            workers = [load["worker"] for load in self.fleet() if load["state"] == "ready"]
            return {worker["worker_id"]: worker["role"] for worker in workers}

        wanted = {"prefill": num_prefill, "decode": num_decode, "store": num_store}

        def is_whole() -> bool:
            roles = list(ready().values())
            return all(roles.count(role) == number for role, number in wanted.items())

        _wait_until(is_whole, WAIT_S, lambda: f"the fleet is {ready()}")
        hosts = {container["Config"]["Hostname"] for container in self._project.containers()}
        _expect({name.split("-")[1] for name in ready()} <= hosts, f"{ready()} are not named after {hosts}")

    def survive(self, role: str) -> None:
        """Kill a busy worker of a role under load: every answer is right, and the worker comes back under its name."""
        with Load(self, role) as load:
            load.wait_for_more(2 * NUM_CLIENTS)
            worker = self._busy(role)
            docker("exec", worker["worker_id"].split("-")[1], "python", "-c", KILL_THE_SERVICE)
            _wait_until(lambda: self._is_back(worker), WAIT_S, lambda: f"the fleet is {self.fleet()}")
            load.wait_for_more(2 * NUM_CLIENTS)

    def survive_broker(self, name: str) -> None:
        """Kill one of the broker's servers under load: every answer is right."""
        with Load(self, name) as load:
            load.wait_for_more(2 * NUM_CLIENTS)
            self._project.run("kill", name)
            load.wait_for_more(4 * NUM_CLIENTS)

    def _busy(self, role: str) -> dict[str, Any]:
        """Return a worker of the role that is at work."""
        found: list[dict[str, Any]] = []

        def look() -> bool:
            busy = [load for load in self.fleet() if load["worker"]["role"] == role and load["num_running"]]
            found.extend(load["worker"] for load in busy)
            return bool(found)

        _wait_until(look, WAIT_S, lambda: f"no {role} worker has anything to do")
        return found[0]

    def _is_back(self, worker: dict[str, Any]) -> bool:
        return any(
            load["state"] == "ready"
            and load["worker"]["worker_id"] == worker["worker_id"]
            and load["worker"]["incarnation"] != worker["incarnation"]
            for load in self.fleet()
        )


class Load:
    """Clients that ask without a pause, within a `with` block, each time something new. Its end raises CheckFailedError
    unless every answer is, token for token, that of one process alone."""

    def __init__(self, mesh: Mesh, seed: str) -> None:
        self._mesh = mesh
        self._stop = threading.Event()
        self._answers: list[tuple[list[int], list[int]]] = []
        self._failures: list[str] = []
        self._clients = [threading.Thread(target=self._ask, args=(Random(f"{seed} {n}"),)) for n in range(NUM_CLIENTS)]

    def __enter__(self) -> "Load":
        for client in self._clients:
            client.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        for client in self._clients:
            client.join()
        _expect(not self._failures, f"{len(self._failures)} requests failed: {self._failures[:3]}")
        if kind is None:
            self._judge()

    def wait_for_more(self, number: int) -> None:
        """Wait for so many more answers."""
        wanted = len(self._answers) + number
        _wait_until(lambda: len(self._answers) >= wanted, WAIT_S, lambda: f"{len(self._answers)} answers of {wanted}")

    def _ask(self, rng: Random) -> None:
        while not self._stop.is_set():
            prompt = [rng.randrange(*VOCAB) for _ in range(PROMPT_TOKENS)]
            try:
                answer = self._mesh.complete(prompt, max_tokens=ANSWER_TOKENS, ignore_eos=True, return_token_ids=True)
                self._answers.append((prompt, answer["choices"][0]["token_ids"]))
            except CheckFailedError as error:
                self._failures.append(str(error))

    def _judge(self) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        model: Any = AutoModelForCausalLM.from_pretrained(DEMO_MODEL_DIR, dtype=torch.float32)
        num_wrong = sum(not _is_greedy(model, prompt, answer) for prompt, answer in self._answers)
        _expect(not num_wrong, f"{num_wrong} of {len(self._answers)} answers are wrong")


def _is_greedy(model: Any, prompt: list[int], answer: list[int]) -> bool:
    """Whether each token is the likeliest after all before it, by one pass of the library's own model: then the answer
    is the one of a single process. A gap below 1e-4 of the logits' spread is a tie, which either token may win."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].float()
    best, least = logits.max(-1).values, logits.min(-1).values
    chosen = logits.gather(-1, torch.tensor(answer)[:, None])[:, 0]
    return len(answer) == ANSWER_TOKENS and bool((best - chosen <= 1e-4 * (best - least)).all())


def _is_well(state: dict[str, Any]) -> bool:
    if state["Status"] == "exited":
        return state["ExitCode"] == 0  # what runs once
    return state["Status"] == "running" and state.get("Health", {}).get("Status") == "healthy"


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise CheckFailedError(otherwise)


def _wait_until(holds: Callable[[], bool], timeout_s: float, otherwise: Callable[[], str]) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            raise CheckFailedError(f"not within {timeout_s:.0f} s: {otherwise()}")
        time.sleep(POLL_S)
