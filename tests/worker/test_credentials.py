"""Whose word is taken: the gateway's for whose a request is, a holder's for a copy."""

import asyncio

import msgspec
import pytest

from schemas.ids import RequestId, WorkerId
from schemas.kv import RequestLease
from schemas.request import RefusalReason, Refused, RunAttempt
from schemas.subjects import Role
from services.config import MeshConfig
from services.errors import UserError
from services.runtime import now_ms
from services.trust.credentials import (
    MAX_SIGNERS,
    SignerClocks,
    TenantSignature,
    TenantSigner,
    holder_credentials,
    signer_of,
)
from services.trust.keys import MeshKeys, with_key
from tests.credentials import CREDENTIALS, SECRET, SEED, SIGNER, credentials_for, proved
from tests.worker import worker_cases as case

pytestmark = pytest.mark.virtual_time

ME = WorkerId("p-0")
LEASE = RequestLease(
    request_id=RequestId("r1"), attempt=1, deadline_ms=9_000, reader=WorkerId("d-0"), fingerprint="f", first_block=0,
    block_hashes=bytes(32), tenant="acme",
)  # fmt: skip


def reason(request: RunAttempt | RequestLease, holder: WorkerId = ME) -> RefusalReason | None:
    refused = CREDENTIALS.refusal(request, holder)
    return None if refused is None else refused.reason


@pytest.mark.parametrize("request_", [case.run_prefill(), case.reserve(), LEASE], ids=lambda each: type(each).__name__)
def test_a_request_is_taken_with_its_gateways_signature_only(
    request_: RunAttempt | RequestLease,
) -> None:
    signed = proved(msgspec.structs.replace(request_, deadline_ms=now_ms() + 60_000))
    assert reason(signed) is None
    stranger = TenantSigner("another seed").sign(signed.request_id, signed.tenant, signed.deadline_ms)
    for change in (
        {"signature": b""}, {"signature": signed.signature[:-1]}, {"signature": stranger}, {"tenant": "other"},
        {"request_id": RequestId("r2")},
    ):  # fmt: skip
        assert reason(msgspec.structs.replace(signed, **change)) is RefusalReason.UNSIGNED, change
    assert reason(msgspec.structs.replace(signed, attempt=2)) is None, "the next attempt is the same request"


async def test_a_word_that_is_over_is_not_taken_whatever_the_clocks_say() -> None:
    """No clock of another machine is read: a holder hears how late it is from the gateway itself."""
    holder = credentials_for([SECRET], SIGNER)
    words = [_proved_for(SIGNER, seconds) for seconds in (5, 60)]
    assert [holder.refusal(word, ME) for word in words] == [None, None]
    await asyncio.sleep(6)
    assert _is_over(holder.refusal(words[0], ME)) and holder.refusal(words[1], ME) is None
    late = credentials_for([SECRET], SIGNER)
    assert late.refusal(words[0], ME) is None, "of this gateway it has heard nothing yet"
    assert late.refusal(_proved_for(SIGNER, 60), ME) is None
    assert _is_over(late.refusal(words[0], ME)), "by now it knows"
    other = TenantSigner(SEED)
    assert late.refusal(_proved_for(other, 60), ME) is None, "each gateway has its own clock"


def test_what_a_holder_knows_of_clocks_is_bounded() -> None:
    clocks = SignerClocks()
    for number in range(3 * MAX_SIGNERS):
        assert not clocks.is_over(TenantSignature(str(number), 5, 6, b""), now_ms=0)
    assert len(clocks._ahead_ms) == MAX_SIGNERS


def _proved_for(signer: TenantSigner, seconds: int) -> RunAttempt:
    run = case.run_prefill()
    proof = signer.sign(run.request_id, run.tenant, now_ms() + 1_000 * seconds)
    return msgspec.structs.replace(run, signature=proof)


def _is_over(refused: Refused | None) -> bool:
    return refused is not None and "is over" in refused.detail


def test_a_copy_is_for_holders_and_for_the_one_that_was_asked() -> None:
    copy = CREDENTIALS.sign_copy(msgspec.structs.replace(LEASE, is_copy=True), ME)
    assert reason(copy) is None
    assert reason(copy, WorkerId("another")) is RefusalReason.UNSIGNED
    for change in (
        {"tenant": "other"}, {"reader": WorkerId("d-1")}, {"block_hashes": bytes(16)}, {"first_block": 1},
        {"is_copy": False}, {"signature": b""}, {"signature": proved(LEASE).signature},
    ):  # fmt: skip
        assert reason(msgspec.structs.replace(copy, **change)) is RefusalReason.UNSIGNED, change
    gateway = credentials_for([b"no ticket secret"], SIGNER)
    assert reason(gateway.sign_copy(copy, ME)) is RefusalReason.UNSIGNED


def test_holders_of_an_older_and_a_newer_list_of_secrets_copy_from_each_other() -> None:
    new = credentials_for([b"the next secret", SECRET], SIGNER)
    asked = msgspec.structs.replace(LEASE, is_copy=True)
    assert new.refusal(CREDENTIALS.sign_copy(asked, ME), ME) is None
    assert CREDENTIALS.refusal(new.sign_copy(asked, ME), ME) is not None, "so each gets the new one second at first"
    both = credentials_for([SECRET, b"the next secret"], SIGNER)
    assert both.refusal(new.sign_copy(asked, ME), ME) is None


def test_each_role_s_key_file_has_its_own_secrets() -> None:
    roles = MeshKeys.fresh().roles
    gateway, holder = (with_key(MeshConfig(), roles[role]) for role in (Role.GATEWAY, Role.HOLDER))
    signed = _proved_for(signer_of(gateway), 60)
    assert holder_credentials(holder).refusal(signed, ME) is None
    for role in (Role.SCHEDULER, Role.DIRECTORY):
        assert with_key(MeshConfig(), roles[role]) == MeshConfig()
    with pytest.raises(UserError):
        holder_credentials(gateway)
    with pytest.raises(UserError):
        signer_of(holder)


def test_what_is_no_key_is_one_line() -> None:
    secrets = ("s" * 16,)
    for bad, says in (
        (MeshConfig(ticket_secrets=secrets), "kvmesh bus-config"),
        (MeshConfig(ticket_secrets=secrets, tenant_public_key="xy"), "64 hexadecimal digits"),
        (MeshConfig(ticket_secrets=secrets, tenant_public_key="ab" * 31), "64 hexadecimal digits"),
        (MeshConfig(ticket_secrets=secrets, tenant_seed="short"), "tenant_seed"),
        (MeshConfig(ticket_secrets=(*secrets, "short"), tenant_seed="s" * 16), "ticket_secrets"),
    ):
        with pytest.raises(UserError, match=says):
            holder_credentials(bad)
    with pytest.raises(UserError, match="tenant_seed"):
        signer_of(MeshConfig())
