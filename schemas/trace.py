"""What services say of traces."""

from schemas.message import Message


class KeepTrace(Message, frozen=True, kw_only=True):
    """Export what there is of this trace, though it was not sampled. `trace_id`: 32 hexadecimal digits."""

    trace_id: str
    reason: str
