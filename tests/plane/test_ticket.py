import base64

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.blocks.ticket import Ticket, TicketRefusedError, TicketSecrets
from dataplane.limits import MAX_TICKET_CHARS
from schemas.ids import LeaseId, WorkerId

SECRET = b"secret"
TICKET = Ticket(
    lease_id=LeaseId("lease-1"),
    epoch=3,
    nonce="n",
    incarnation="i",
    holder=WorkerId("p"),
    reader=WorkerId("d"),
    tenant="",
    expires_at_ms=1000,
)
SECRETS = TicketSecrets([SECRET])
TOKEN = SECRETS.sign(TICKET)


def verified(secrets: TicketSecrets, token: str, now_ms: int = 0) -> Ticket:
    return secrets.signed(token).ticket(now_ms)


def refusal(token: str, secret: bytes = SECRET, now_ms: int = 0) -> str:
    with pytest.raises(TicketRefusedError) as raised:
        verified(TicketSecrets([secret]), token, now_ms)
    assert len(token) < 20 or token not in str(raised.value)
    return raised.value.reason


def test_verify_returns_what_was_signed() -> None:
    assert verified(SECRETS, TOKEN, 999) == TICKET


def test_refused_after_its_time_and_under_another_secret() -> None:
    assert refusal(TOKEN, now_ms=1000) == "expired"
    assert refusal(TOKEN, b"other") == "signature"


def test_two_secrets_at_a_time() -> None:
    """The first signs, each verifies; what is out of the list does not, from that moment on."""
    secrets = TicketSecrets([SECRET])
    secrets.replace([b"new", SECRET])
    new = secrets.sign(TICKET)
    assert verified(secrets, TOKEN) == verified(secrets, new) == verified(TicketSecrets([b"new"]), new) == TICKET
    secrets.replace([b"new"])
    assert verified(secrets, new) == TICKET
    with pytest.raises(TicketRefusedError, match="signature"):
        verified(secrets, TOKEN)


@pytest.mark.parametrize("token", ["", ".", "a", "a.b", "é.é", TOKEN + "=", TOKEN.replace(".", ""), "x" * 3000, "\0."])
def test_junk_is_refused(token: str) -> None:
    assert refusal(token) in ("malformed", "signature")


@given(st.text(max_size=300))
def test_any_text_is_refused(token: str) -> None:
    refusal(token)


@given(st.integers(0, len(TOKEN) - 1), st.characters())
def test_any_changed_character_is_refused(at: int, character: str) -> None:
    token = TOKEN[:at] + character + TOKEN[at + 1 :]
    if token != TOKEN:
        assert refusal(token) in ("malformed", "signature")


def test_signed_junk_is_refused() -> None:
    for text in (b"{}", b"[]", b"\xff", b'{"lease_id":1}', b"[" * 500):
        body = base64.urlsafe_b64encode(text).rstrip(b"=").decode()
        forged = sign_text(body)
        assert refusal(forged) == "malformed"


def test_length_is_bounded() -> None:
    with pytest.raises(ValueError, match="characters"):
        SECRETS.sign(msgspec.structs.replace(TICKET, tenant="x" * MAX_TICKET_CHARS))


def sign_text(body: str) -> str:
    import hashlib
    import hmac

    mac = hmac.new(SECRET, body.encode(), hashlib.sha256).digest()
    return f"{body}.{base64.urlsafe_b64encode(mac).rstrip(b'=').decode()}"
