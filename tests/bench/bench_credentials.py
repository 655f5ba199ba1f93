"""What it costs to sign whose a request is, and to verify it: `python -m tests.bench.bench_credentials`.

Prints the median of many calls, each timed by itself, in microseconds. A gateway signs once for a request; each of its
workers verifies once, and each holder that lends for it once a lease.
"""

import statistics
import time
from collections.abc import Callable

import msgspec

from schemas.ids import RequestId, WorkerId
from schemas.kv import RequestLease
from services.trust.credentials import TenantSigner
from tests.credentials import credentials_for

NUM_CALLS = 5_000
REQUEST = RequestLease(
    request_id=RequestId("req-9f86d081884c7d65"), attempt=1, deadline_ms=1_790_000_000_123,
    reader=WorkerId("decode-0"), fingerprint="f00d", first_block=0, block_hashes=bytes(16 * 64), tenant="research",
)  # fmt: skip


def median_us(call: Callable[[], object]) -> float:
    taken: list[float] = []
    for _ in range(NUM_CALLS):
        started = time.perf_counter()
        call()
        taken.append((time.perf_counter() - started) * 1e6)
    return statistics.median(taken)


def main() -> None:
    signer = TenantSigner("a seed of the measurement")
    holder, me = credentials_for([b"a secret of the measurement"], signer), WorkerId("prefill-0")
    proof = signer.sign(REQUEST.request_id, REQUEST.tenant, REQUEST.deadline_ms)
    signed = msgspec.structs.replace(REQUEST, proof=proof)
    copy = holder.prove_copy(msgspec.structs.replace(REQUEST, is_copy=True), me)
    assert holder.refusal(signed, me) is None and holder.refusal(copy, me) is None
    for what, call in (
        ("a gateway signs a request", lambda: signer.sign(REQUEST.request_id, REQUEST.tenant, REQUEST.deadline_ms)),
        ("a holder verifies it", lambda: holder.refusal(signed, me)),
        ("a holder proves a copy", lambda: holder.prove_copy(copy, me)),
        ("a holder verifies that", lambda: holder.refusal(copy, me)),
    ):
        print(f"{what}: {median_us(call):.0f} us")


if __name__ == "__main__":
    main()
