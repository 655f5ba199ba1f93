"""Whatever is lost, doubled or late: once a worker is heard of and answers, the directory says what it holds."""

from hypothesis import given
from hypothesis import strategies as st

from schemas.block import BlockHasher, split_hashes
from schemas.directory import BlocksEvicted, BlocksStored, Inventory
from schemas.ids import WorkerId
from schemas.worker import WorkerInfo, WorkerLeft
from services.directory.core import DirectoryCore
from services.worker.ledger import BlockLedger

W = WorkerId("w")


def info(incarnation: str) -> WorkerInfo:
    return WorkerInfo(
        worker_id=W, incarnation=incarnation, role="prefill", model="m", fingerprint="f", num_blocks=8,
        block_size=1, context_length=64,
    )  # fmt: skip


def settle(core: DirectoryCore, ledger: BlockLedger, incarnation: str, wanted: list, page: int = 3) -> None:
    """Carry out readings against the live worker, a few blocks a page; others' are failures, as in the service."""
    for _ in range(200):
        if not wanted:
            return
        read = wanted.pop(0)
        if read.incarnation != incarnation:
            core.inventory_failed(read)
            continue
        whole = ledger.inventory(0)
        hashes = split_hashes(whole.block_hashes)
        end = min(read.offset + page, len(hashes))
        wanted += core.inventory(
            Inventory(worker_id=W, incarnation=incarnation, sequence=whole.sequence,
                      block_hashes=b"".join(hashes[read.offset : end]), next_offset=end if end < len(hashes) else None)
        )  # fmt: skip
        core.check_integrity()
    raise AssertionError("reads without end")


@given(st.data())
def test_it_converges(data: st.DataObject) -> None:
    core, wanted, late = DirectoryCore(), [], []
    for incarnation in ("a", "b"):
        ledger = BlockLedger(W, incarnation)
        for step in range(data.draw(st.integers(0, 12))):
            if data.draw(st.booleans()):
                event = ledger.record(BlockHasher(1, model_fingerprint="f"), [step % 5, step], 2, [step, step + 50])
            else:
                event = ledger.forget([data.draw(st.integers(0, 12)), data.draw(st.integers(50, 62))])
            if event is not None:
                late += [event] * data.draw(st.integers(0, 2))  # lost, once, twice
        late.append(info(incarnation))
        if data.draw(st.booleans()):
            late.append(WorkerLeft(worker_id=W, incarnation=incarnation, reason="silent"))  # rightly or not
    for message in data.draw(st.permutations(late)):
        match message:
            case WorkerInfo():
                wanted += core.heard(message)
            case WorkerLeft():
                core.left(message)
            case BlocksStored() | BlocksEvicted():
                wanted += core.changed(message)
        core.check_integrity()
        if data.draw(st.booleans()):
            settle(core, ledger, "b", wanted)
    settle(core, ledger, "b", wanted)
    last = ledger.record(BlockHasher(1, model_fingerprint="f"), [99], 1, [99])
    for _ in range(3):  # the live worker goes on speaking
        wanted += core.heard(info("b")) + core.changed(last)
        settle(core, ledger, "b", wanted)
    held = set(split_hashes(ledger.inventory(0).block_hashes))
    assert {h for h in held if core.locate([h]) and core.locate([h])[0].incarnation == "b"} == held
    assert core.num_blocks == len(held)
