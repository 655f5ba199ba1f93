"""Every time that the services' protocols wait for, or keep between two messages: the section `[times]` of `mesh.toml`.

A `Wait` says how long somebody is waited for, and `scale` multiplies it, as it does the waits that other sections have
(`services/config.py`): a machine that is ten times slower needs ten times the patience. A `Pace` says how often
something is sent or looked at, and stays.
"""

from typing import Annotated, TypeVar, get_type_hints

import msgspec

from dataplane.times import SCALES, Pace, PaceMs, PlaneTimes, Wait, WaitMs
from services.settings import Variable

StructT = TypeVar("StructT", bound=msgspec.Struct)
TimeScale = Annotated[float, msgspec.Meta(ge=0.1, le=100)]


class PresenceTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Who is alive. The rules are in `services/presence.py`."""

    beat_interval_ms: PaceMs = 300
    """Every worker and store publishes something at least this often: a beat, for schedulers, or its load."""
    partitioned_after_ms: WaitMs = 1_500
    """Who only listens, and receives nothing for this long, is cut off: two loads of every worker are missing."""
    recover_ms: WaitMs = 2_000
    """After a reconnection, the return of one of the broker's servers, or a time without any message, the others
    reconnect as well, each in its own time. For this long it proves nothing that nobody serves a question."""
    rerouted_ms: WaitMs = 400
    """Nor does it for this long after the broker has lost one of its servers: who was connected there connects to
    another one."""
    unserved_gap_ms: WaitMs = 300
    """Two questions that nobody serves must be this far apart before their addressee is dead. It may be reconnecting by
    itself, which takes a client of the bus 200 ms or more."""
    repeat_left_ms: PaceMs = 1_000
    """An incarnation that has left and still speaks is notified of it at most this often, and once more as a server of
    the broker is back."""

    @property
    def load_interval_ms(self) -> int:
        """Every worker and store publishes its load at least this often."""
        return 2 * self.beat_interval_ms

    @property
    def learn_s(self) -> float:
        """Before this a scheduler that has just started may not know the fleet, and refuses nobody for want of
        workers."""
        return 2 * self.load_interval_ms / 1000


class BusTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The connection to NATS."""

    reconnect_wait_s: Pace = 0.2
    """Two attempts to connect are this far apart, or up to twice as far, so that clients do not all come back at
    once."""
    ping_interval_s: Pace = 5.0
    """The broker is pinged so often. One whose machine is gone closes no connection: after three pings without an
    answer it counts as away."""
    server_ping_interval_s: Wait = 0.2
    """One of several servers is pinged so often, and left for the next one where nothing at all has come after two
    pings. It may stand still: others may take us for dead meanwhile."""
    server_connect_timeout_s: Wait = 1.0
    """Each of several servers has this long to take a connection."""
    look_around_s: Pace = 1.0
    """Whose server does not see all of its cluster looks after so long, then more rarely, whether another one sees
    more."""
    ask_again_s: Pace = 0.1
    """After a reconnection a request that nobody serves is sent again so often: who serves it may be on its way
    back."""
    claim_within_s: Wait = 3.0
    """Who lives by a name has this long to answer another one that starts by it, as long as a silence that means
    death: on full cores a living one may be a second late. Who has died costs no wait: the broker reports that
    nobody answers."""
    flush_timeout_s: Wait = 10.0
    """A flush may take this long, unless its caller sets another time. A service that starts gives up then."""
    watch_interval_s: Pace = 0.25
    """The client library's tasks are looked at so often. While one has ended the process receives nothing, so for about
    this long, which is well below the silence that anybody is declared dead for."""
    certificates_look_s: Pace = 1.0
    """The files of certificates, the bus's and https', are looked at so often. What has changed is taken once it is the
    same at two looks."""
    close_timeout_s: Wait = 5.0
    """When the bus closes, the library has this long to send what it still has; what is left then is thrown away."""


class GatewayTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """HTTP clients, and the requests under way."""

    head_s: Wait = 10.0
    """From a connection's beginning until all headers of its first request have come; a TLS handshake may take as
    long."""
    last_look_s: Wait = 0.1
    """From a connection's time being over until it is dropped: what has come meanwhile is read. An event loop fires its
    timers before it reads, so a process that stood still would drop requests that had come in time."""
    keep_alive_s: Wait = 30.0
    """A connection without a request is kept for so long: longer than OpenAI's client keeps its own (5 s), so that it
    is not closed just as that client uses it again."""
    linger_s: Wait = 2.0
    """So long we throw away what a client still sends that was refused before its body was read. Its connection, closed
    at once, would often lose the answer."""
    body_s: Wait = 30.0
    """A body may take so long to come."""
    body_silence_s: Wait = 5.0
    """A body of which nothing comes for so long has stopped coming."""
    turn_s: Wait = 10.0
    """A long body waits for its turn for so long, and so does a grammar; who would wait longer had better come
    again."""
    grammar_s: Wait = 5.0
    """A grammar is understood within this, once it is its turn."""
    write_grace_s: Wait = 5.0
    """How long after the deadline a client that reads slowly may still take what was written."""
    unread_s: Wait = 60.0
    """A client that does not take what is written for it has so long to catch up: within it what its connection keeps,
    64 KiB and more. Then the connection is cut."""
    health_timeout_s: Wait = 2.0
    """How long a health check waits for the scheduler's answer; as long as a placement does."""
    first_output_s: Pace = 1.0
    """A streamed answer's status and headers wait for its first output, but no longer than this: what fails so soon has
    a status of its own."""
    silence_s: Pace = 5.0
    """A stream on which nothing was written for so long gets a comment: proxies and clients end what is silent, many
    after a minute, some after ten seconds."""
    drain_s: Wait = 5.0
    """How long running requests may take to end by themselves once the gateway stops."""
    place_timeout_s: Wait = 2.0
    """A scheduler answers from memory; one that does not within this is dead or overloaded."""
    place_turn_s: Wait = 0.25
    """A tenant's questions for placements go a few at a time; one that takes longer holds up no other."""
    tick_s: Pace = 0.05
    """How exactly the waits of requests under way are kept."""
    partitioned_wait_ms: WaitMs = 15_000
    """What waits for a placement waits so much longer where nothing is received: the broker may only stand still.
    One that does so for longer is taken for gone by its clients as well (three pings, `BusTimes.ping_interval_s`)."""
    pause_min_ms: PaceMs = 100
    pause_max_ms: PaceMs = 1_000
    """The time between two questions for a placement of what is under way, whatever the refusal asks for."""
    load_kept_ms: WaitMs = 10_000
    """A worker's load is forgotten after so long without another."""
    ended_kept_ms: PaceMs = 300_000
    """Requests that have ended can be asked for so long."""
    seek_timeout_s: Wait = 0.25
    """How long the other gateways have to answer that they know a request."""
    gap_ms: PaceMs = 150
    """A missing token is asked for after this: two messages of different workers may well overtake each other."""


class SchedulerTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Looking after workers, and placing requests on them."""

    proof_timeout_s: Wait = 1.0
    """A message through the broker to ourselves that has not come back after this is given up and another one sent: it
    may have been lost with a connection. Until one comes back nobody's silence counts."""
    locate_timeout_s: Wait = 0.05
    """A directory that is down or slow may cost a request this much."""


class DirectoryTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Knowing who holds what."""

    inventory_timeout_s: Wait = 2.0
    """A worker has this long to answer with one page of its inventory. One that does not is asked again when it speaks
    next."""
    forget_after_ms: WaitMs = 15_000
    """A holder that has sent nothing for so long is forgotten, as whoever would publish that it has left may have ended
    too. Workers publish their load at least every 0.6 s; one that speaks again has its inventory read."""
    tick_s: Pace = 5.0
    """The directory looks for holders that are silent so often: often enough beside `forget_after_ms`."""


class WorkerTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A worker, whatever its role."""

    tick_ms: PaceMs = 100
    """The timer: it keeps deadlines, renews the leases whose streams move, and notices that it stood still."""
    lease_answer_ms: WaitMs = 2_000
    """How long a reader waits for a holder's answer to its question for a lease. A worker answers from memory, a store
    may have to look behind it."""
    open_lease_within_ms: WaitMs = 5_000
    """How long a lease that a reader has asked for waits for its read to begin."""
    lent_read_base_s: Wait = 30.0
    """A lent lease ends so long after its read had to begin, and its bytes at `READ_BYTES_PER_S_MIN`, however much
    moves: the most patient reader, a store, gives its read up by itself before that."""
    retain_answer_ms: WaitMs = 60_000
    """How long an ended attempt's answer is kept for a gateway that has missed some of it."""
    read_base_s: Wait = 2.0
    """A read that takes longer than this and its bytes at `READ_BYTES_PER_S_MIN` is given up: computing would be
    quicker."""
    coming_again_s: Pace = 0.05
    """The pause before a holder that is still computing is asked again; it has waited itself before it answered so."""
    fleet_answer_s: Wait = 1.0
    """How long a reader waits for the scheduler's word of who there is, where it has not seen a holder join."""
    fleet_ask_interval_ms: PaceMs = 200
    """The least time between two such questions: whoever names strangers must not have the scheduler asked all the
    time."""
    offer_interval_ms: PaceMs = 250
    """The least time between two offers of one sequence's new blocks to its replica, unless `OFFER_BLOCKS` are new."""
    read_within_ms: WaitMs = 10_000
    """How long an offer of blocks stands: the source gives the blocks up when it needs the room."""
    load_min_gap_s: Pace = 0.2
    """A change is published at once, unless another one was less than this ago: at most five loads a second."""
    round_interval_s: Pace = 1.0
    """Between two rounds of asking the gateways which attempts they still want."""
    suspicious_interval_s: Pace = 0.5
    """The same, where a gateway may be dead."""
    answer_timeout_s: Wait = 1.0
    """How long a gateway's answer to that is waited for."""
    engine_stop_timeout_s: Wait = 10.0
    """How long the engine's running step is waited for."""
    leave_answer_s: Wait = 1.0
    """How long the scheduler's word is waited for on whether anybody else could go on with what runs; and the
    directory's on which blocks are hot."""
    copiers_quiet_s: Pace = 0.3
    """A worker that leaves is done with offering its blocks once nobody has asked for any for so long."""
    prompts_end_s: Wait = 0.5
    """How long a worker that leaves goes on with prompts that are nearly computed, before it hands them back."""
    readers_come_ms: WaitMs = 1_000
    """How long a worker that migrates an answer waits for whoever goes on with it to come for what it has."""
    readers_stay_s: Wait = 2.0
    """How long it then waits until they have read it; and again, whatever it lends meanwhile, before it stops
    serving."""
    last_words_s: Wait = 5.0
    """How long the last messages are waited for: the bus may be away for good."""
    ask_after_ms: PaceMs = 1_000
    """How long an attempt goes on before its gateway is asked: most end earlier."""


class PrefillTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a prefill worker waits for in a hand-over."""

    unknown_after_ms: WaitMs = 1_500
    """How long a decode worker may report that it has room for a hand-over that nobody has asked for here. The two
    requests are sent at once: what was not received by then was taken by a predecessor of this process, or is lost."""
    offer_again_ms: PaceMs = 250
    """The least time between two offers of one lease."""
    landed_grace_ms: WaitMs = 2_000
    """How long a lease waits for its reader's message once the stream has ended, well or not: the message may be
    lost."""
    duplicate_computes_within_ms: WaitMs = 600_000
    """How long a prompt waits for the blocks that another one's computation fills. It would be computed beside it, and
    no sooner: its deadline is the bound."""


class DecodeTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a decode worker waits for in a hand-over."""

    reserved_again_ms: PaceMs = 500
    """How often the source is notified again that there is room, until its offer comes: either message may be lost."""
    duplicate_lands_within_ms: WaitMs = 60_000
    """How long a reservation waits for the blocks that come for another one: as long as a long prompt may take in line
    and in computation. What is sent again costs bytes, no more."""


class StoreTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The store of KV. What it lends is bounded as a worker's."""

    lend_after_s: Pace = 0.1
    """What a load has brought after so long is lent, and is read while the rest comes."""
    unasked_s: Wait = 1.0
    """A load that nobody has asked for again within so long begins no further batch."""
    pause_s: Pace = 5.0
    """How long a tier that failed is left alone: readers must not wait for its timeout again and again."""
    flush_timeout_s: Wait = 5.0
    """How long a store that is stopped goes on writing behind memory."""


class AttachTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Servers that attach to a holder."""

    hello_s: Wait = 10.0
    """Whoever connects says within this time who it is."""
    pin_s: Wait = 60.0
    """What was found is pinned for so long at most."""
    purse_s: Wait = 1.0
    """Slots of a server that has gone are given to others after so long: its last copy has ended by then."""
    handoff_wait_max_s: Wait = 5.0
    """A question waits no longer than this for blocks that another server is about to save."""
    fetch_s: Wait = 2.0
    """What another holder, or the tier behind memory, has not brought within so long is computed."""
    hint_retry_s: Pace = 0.02
    """Between two questions to a holder that is said to be getting blocks."""
    canary_timeout_s: Wait = 300.0
    """For one request of a canary, and until a server that starts takes requests: it compiles what it needs."""
    canary_retry_s: Pace = 60.0
    """A server whose API has not answered is asked again after so long."""
    health_retry_s: Pace = 1.0
    """The same while it starts."""
    saved_s: Wait = 5.0
    """So long what a canary has computed may take to be saved."""
    saved_look_s: Pace = 0.05


class TelemetryTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Spans and metrics."""

    export_interval_s: Pace = 0.5
    """Between two exports of spans."""
    close_s: Wait = 3.0
    """How long the last spans may take to leave: a back end that is away must not keep a service from its end."""
    sample_interval_s: Pace = 0.5
    """Between two looks at what metrics show of the present: blocks, queues, ages."""
    clock_interval_s: Pace = 10.0
    """Between two questions for the scheduler's time."""
    clock_soon_s: Pace = 0.25
    """The same, as a service starts."""
    clock_within_s: Wait = 1.0
    """How long its answer is waited for."""


class Times(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """All of them. `scale`: what `scaled` multiplies every wait by when a configuration is read."""

    scale: Annotated[TimeScale, Variable("KVMESH_TIME_SCALE")] = 1.0
    presence: PresenceTimes = PresenceTimes()
    bus: BusTimes = BusTimes()
    gateway: GatewayTimes = GatewayTimes()
    scheduler: SchedulerTimes = SchedulerTimes()
    directory: DirectoryTimes = DirectoryTimes()
    worker: WorkerTimes = WorkerTimes()
    prefill: PrefillTimes = PrefillTimes()
    decode: DecodeTimes = DecodeTimes()
    store: StoreTimes = StoreTimes()
    attach: AttachTimes = AttachTimes()
    telemetry: TelemetryTimes = TelemetryTimes()
    plane: PlaneTimes = PlaneTimes()


def scaled(record: StructT, factor: float) -> StructT:
    """Return the record with every wait in it, and in the records within it, multiplied."""
    hints = get_type_hints(type(record), include_extras=True)
    changes: dict[str, object] = {}
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if isinstance(value, msgspec.Struct):
            changes[name] = scaled(value, factor)
        elif _is_wait(hints[name]):
            changes[name] = round(value * factor) if isinstance(value, int) else value * factor
    if "scale" in record.__struct_fields__:
        changes["scale"] = 1.0  # it has been applied
    return msgspec.structs.replace(record, **changes)


def _is_wait(hint: object) -> bool:
    marks = getattr(hint, "__metadata__", ())
    return any(isinstance(mark, msgspec.Meta) and SCALES in (mark.extra or {}) for mark in marks)
