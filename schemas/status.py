"""What anybody may ask of the mesh with an empty message: one worker, one request. Ages are in milliseconds."""

from typing import Literal

import msgspec

from schemas.ids import GatewayId, LeaseId, RequestId, WorkerId
from schemas.message import Message
from schemas.worker import WorkerLoad

RunStage = Literal["queued", "reserved", "fetching", "receiving", "computing", "handing_over", "ending"]
"""`queued`: it waits for blocks. `reserved`: it has them, and waits for its KV. `fetching`: it reads what others hold;
`receiving`: what its prefill worker computes. `handing_over`: computed, kept for its reader. `ending`: over, and its
blocks wait for whoever may still write them."""

RequestPhase = Literal["placing", "waiting", "prefill", "decode", "finished", "failed", "cancelled", "unknown"]
"""`waiting`: to ask for a placement again. `unknown`: no gateway knows it; it may have ended a while ago."""


class DescribeWorker(Message, frozen=True, kw_only=True):
    """What does this worker do?"""


class HeldRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt on a worker, `age_ms` after the worker has taken it. `reading_from`: whose KV is coming in.

    `replica`: no attempt of this worker's, blocks of another's that are copied.
    """

    request_id: RequestId
    attempt: int
    part: Literal["prefill", "decode", "replica"]
    stage: RunStage
    age_ms: int
    num_prompt_tokens: int = 0
    reading_from: str = ""


class HeldLease(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that `reader` may read. `left_ms`: until it expires, unless it is renewed."""

    lease_id: LeaseId
    reader: WorkerId
    num_blocks: int
    age_ms: int
    left_ms: int


class WorkerDescribed(Message, frozen=True, kw_only=True):
    """The oldest first; of many requests or leases only so many are listed. What is read how quickly from whom stands
    in `load.rates.transfers`."""

    load: WorkerLoad
    requests: tuple[HeldRequest, ...] = ()
    leases: tuple[HeldLease, ...] = ()
    num_requests: int = 0
    num_leases: int = 0


class DescribeRequest(Message, frozen=True, kw_only=True):
    """Where is this request now, and since when?"""


class RequestDescribed(Message, frozen=True, kw_only=True):
    """Where a request is. `phase_age_ms`: for how long it has been there; `left_ms`: until its deadline."""

    request_id: RequestId
    phase: RequestPhase
    phase_age_ms: int = 0
    age_ms: int = 0
    left_ms: int = 0
    gateway_id: GatewayId = GatewayId("")
    attempt: int = 0
    prefill_worker: str = ""
    decode_worker: str = ""
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    max_tokens: int = 0
    detail: str = ""
    """Why it ended, or why this is not its first attempt."""
