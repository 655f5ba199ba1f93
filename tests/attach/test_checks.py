"""Each check by itself: switched off, the mistake that it is there for gives wrong answers. So each of them is needed,
and a test that passes with it finds something."""

from collections.abc import Generator
from pathlib import Path

import msgspec
import pytest

from schemas.attach import Half
from services.attach import door
from services.attach.canary import Verdict
from services.attach.connector.worker_half import WorkerHalf
from services.attach.core import AttachCore, Proof
from tests.attach.core_rig import IDENTITY
from tests.attach.fake_server import FakeServer, fake_server
from tests.attach.live_holders import LiveHolders, live_holders
from tests.attach.test_halves import alone, prompt, swap_halves, take_neighbours
from tests.waiting import wait_until

SIZE = IDENTITY.block_size
OTHER = msgspec.structs.replace(IDENTITY, kv_format="vllm0/another rank")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "attach.sock"


@pytest.fixture
def holder(path: Path) -> Generator[LiveHolders]:
    with live_holders(path) as running:
        yield running


@pytest.fixture
def no_canary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "run_canary", lambda hello, word, times: Verdict(Proof.RIGHT, "it is switched off"))


def is_wrong(server: FakeServer, path: Path, seed: int = 1) -> bool:
    """Return whether it loads a prompt and answers wrongly, which nobody notices."""
    ran = server.run(prompt(seed))
    return ran.num_loaded > 0 and ran.num_failed == 0 and ran.answer != alone(path, prompt(seed))


def test_the_canary(path: Path, holder: LiveHolders, no_canary: None) -> None:
    """What is saved is right, and loaded wrongly."""
    server = FakeServer(path, "a")
    swap_halves(server)
    try:
        server.start()
        wait_until(lambda: is_wrong(server, path))
    finally:
        server.close()


def test_the_canary_of_who_saves(path: Path, holder: LiveHolders, no_canary: None) -> None:
    """What is saved is another block: the other server is wrong then."""
    server = FakeServer(path, "a")
    take_neighbours(server)
    try:
        server.start()
        with fake_server(path, "b") as other:
            other.await_proven()
            wait_until(lambda: server.run(prompt(1)).num_loaded > 0)
            assert is_wrong(other, path)
    finally:
        server.close()


def test_the_digest(path: Path, holder: LiveHolders, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_server(path, "a") as server:
        server.await_proven()
        wait_until(lambda: server.run(prompt(1)).num_loaded == 5 * SIZE)

        def damage(plan) -> None:
            for load in plan.loads:
                arena = server.worker._arena_of(plan.attachment)
                assert arena is not None
                arena.planes[0][0][load.slots[2], 5] ^= 1
                digests = dict(zip(load.pages, load.digests, strict=True))
                monkeypatch.setattr(WorkerHalf, "_page_digest", lambda _, page, known=digests: known[page])

        server.on_plan = damage
        assert is_wrong(server, path)


@pytest.mark.parametrize("check_every", [1, 1 << 30], ids=["on", "off"])
def test_samples(path: Path, holder: LiveHolders, check_every: int) -> None:
    """A server becomes wrong after it has proven itself."""
    with fake_server(path, "a") as one, fake_server(path, "b", check_every=check_every) as other:
        one.await_proven()
        other.await_proven()
        one.wrong = 1
        one.run(prompt(1))
        if check_every == 1:
            wait_until(lambda: not is_wrong(other, path) and bool(other.clients[Half.SCHEDULER].off_reason))
        else:
            wait_until(lambda: is_wrong(other, path))


@pytest.mark.parametrize("with_canary", [True, False])
def test_the_identity(
    path: Path, holder: LiveHolders, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, with_canary: bool
) -> None:
    """Servers whose KV is another are told apart by it alone. Left out, the canary still finds them."""
    if not with_canary:
        request.getfixturevalue("no_canary")
    refusal = AttachCore._refusal

    def without(self, hello):
        return refusal(self, msgspec.structs.replace(hello, identity=IDENTITY))

    with fake_server(path, "a") as one:
        one.await_proven()
        monkeypatch.setattr(AttachCore, "_refusal", without)
        with fake_server(path, "b", wrong=1, identity=OTHER) as other:
            # Its blocks have hashes of their own, as the format is part of them: take that away, too.
            other.scheduler._fingerprint = one.scheduler._fingerprint
            if with_canary:
                assert "differs" in other.await_off()
                assert not is_wrong(other, path)
            else:
                other.await_proven()
                one.run(prompt(1))
                wait_until(lambda: is_wrong(other, path))
