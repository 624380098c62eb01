"""Messages between coordinator, ranks and server.

What goes to the ranks travels through SGLang's own input sockets, whose transport broadcasts it inside each TP group.
What a rank sends to the coordinator (:data:`FromRank`) is encoded here.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any, NamedTuple, cast

import msgspec

from sglang_pat.policies.lending import Count, Training

Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""What policies compute with; more cannot be read."""

ClientName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")]
"""What a client calls itself: its rounds and the ranks that it borrows are known by it."""

CLIENT = "default"
"""Name of a client that does not say its own."""

LEASE_SECONDS = 600.0
"""Seconds of a lease of a client over HTTP that does not say another time.  The tools of agents may take minutes."""

LeaseSeconds = Annotated[float, msgspec.Meta(ge=1, le=86400)]
"""Seconds of a lease, a day at most."""


NO_KV = sys.maxsize
"""Value of ``recompute_below`` with which no KV moves, and no memory is needed to move it through."""


class SwitchCommand(msgspec.Struct, frozen=True, kw_only=True):
    """What a switch leads to.

    Attributes:
        stride: so many ranks of which the first works, and the others are lent.
        recompute_below: requests with fewer KV tokens go over as tokens (``--pat-kv auto``); :data:`NO_KV`: all do,
            whatever ``--pat-kv`` says.
    """

    epoch: int
    tp: int
    stride: int = 1
    recompute_below: int = 0


class Prepare(SwitchCommand, frozen=True, tag=True):
    """The command to get ready for a switch while decoding goes on."""


class Switch(SwitchCommand, frozen=True, tag=True):
    """The command to enter the switch at the next iteration boundary."""


class Cancel(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The command to forget about a prepared switch: another rank could not prepare."""

    epoch: int


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """A grammar and how many requests have it; ``kind`` and ``text`` are SGLang's cache key."""

    kind: str
    text: str
    count: int


class Compile(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The command to compile what requests of other groups will need; answered like ``Prepare``, while decoding goes
    on."""

    epoch: int
    grammars: list[Grammar]


class Prepared(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A rank's answer that it is ready.  ``grammars``: from leaders, what their requests need, which ranks of other
    groups may get."""

    rank: int
    epoch: int
    seconds: float
    error: str = ""
    grammars: list[Grammar] = []


class RankSwitched(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """One rank's account of a switch.

    ``phases`` maps phase name to seconds; ``error`` is set if the switch was aborted.
    Requests are counted once per TP group, by its leader: ``migrated`` go on decoding, ``parked`` wait with KV in
    the cache, ``recomputed`` lost theirs, ``recomputed_tokens`` in all.
    """

    rank: int
    epoch: int
    phases: dict[str, float]
    moved_bytes: int = 0
    requests_in: int = 0
    requests_out: int = 0
    migrated: int = 0
    parked: int = 0
    recomputed: int = 0
    recomputed_tokens: int = 0
    tokens: int = 0
    error: str = ""


class MemoryReleased(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A rank that switch ``epoch`` has lent has given its memory away: so many bytes, 0 without a memory saver.

    ``error``: why it could not.
    """

    rank: int
    epoch: int
    bytes: int = 0
    error: str = ""


class Running(msgspec.Struct, frozen=True, array_like=True):
    """A request that is not finished: prompt tokens, tokens generated, most that may be, and its prompt's hash."""

    prompt: Int64
    output: Int64
    limit: Int64
    family: Int64


class Finished(msgspec.Struct, frozen=True, array_like=True):
    """A response of ``length`` tokens.

    Attributes:
        cut: aborted or at its limit, it would have been longer.
        since: tokens that it had when it came, of an earlier request that was cut there.
    """

    length: Int64
    family: Int64
    cut: bool
    since: Int64 = 0


class Decoded(msgspec.Struct, frozen=True, array_like=True):
    """Decode steps of a replica that followed another decode step of the same degree.

    ``steps``: how many; ``seconds``, ``requests``, ``tokens``: so many times the median of their times, rows and
    contexts.  A draft has a row of its own.
    """

    steps: int = 0
    seconds: float = 0.0
    requests: int = 0
    tokens: int = 0


class StepCounts(NamedTuple):
    """Sums over decode steps of replicas.

    Attributes:
        draft_steps: steps of ``decode_steps`` that checked ``drafts``, of which ``right_drafts`` were right.
        seconds_saved: seconds that plain steps for the same tokens would have taken more, by the profile; 0 without.
    """

    decode_steps: int = 0
    draft_steps: int = 0
    drafts: int = 0
    right_drafts: int = 0
    seconds_saved: float = 0.0

    def add(self, other: StepCounts) -> StepCounts:
        return self._make(a + b for a, b in zip(self, other, strict=True))


GENERATED_PARAM = "pat_generated"
"""Key in ``custom_params`` of a request that resumes a response: how many of the last tokens of its prompt are that
response's."""

LIMIT_PARAM = "pat_limit"
"""Key in ``custom_params`` with the longest response that policies are to reckon with, where ``max_new_tokens`` would
give a response's length away (benchmarks with lengths fixed in advance)."""

DRAFTS_PARAM = "pat_drafts"
"""Key in ``custom_params`` with the most drafts of the request in a step (``--pat-speculate``); 0: none."""

ROUND_PARAM = "pat_round"
"""Key in ``custom_params`` with the name of the round, and of its client, that the request belongs to."""

ROUND_MARK = "pat_round"
"""Attribute of a tokenized request on its way to a rank with the name of its round; the coordinator sets it."""

INT32 = 2**31 - 1


def get_length_limit(params: Any) -> int | None:
    """The longest response that policies reckon with, from SGLang's ``SamplingParams``; a number of 32 bits.

    What came with the prompt of it counts.  None if neither the request nor SGLang has set one yet.
    """
    limit = _get_custom_number(params, LIMIT_PARAM)
    if limit is None and params.max_new_tokens is not None:
        limit = params.max_new_tokens + count_prefix_tokens(params)
    return None if limit is None else min(limit, INT32)


def get_most_drafts(params: Any) -> int | None:
    """The most drafts that a request wants, from SGLang's ``SamplingParams``; None if it does not say."""
    return _get_custom_number(params, DRAFTS_PARAM)


def count_prefix_tokens(params: Any) -> int:
    """Tokens of the response that came with the prompt, from SGLang's ``SamplingParams``; a number of 32 bits."""
    return min(_get_custom_number(params, GENERATED_PARAM) or 0, INT32)


def take_round_name(params: Any) -> str:
    """The round that SGLang's ``SamplingParams`` name, "" if none; they do not name it any more.

    SGLang makes a cycle of references of each request whose ``custom_params`` it gets to see.
    """
    custom = cast("dict[str, Any]", params.custom_params or {})
    name = custom.get(ROUND_PARAM)
    if name is None:
        return ""
    params.custom_params = {key: value for key, value in custom.items() if key != ROUND_PARAM} or None
    return name


def _get_custom_number(params: Any, name: str) -> int | None:
    """The number under a key of ``custom_params``, which the server has checked; None if there is none."""
    return cast("dict[str, Any]", params.custom_params or {}).get(name)


class Step(msgspec.Struct, frozen=True, array_like=True):
    """One step of a replica of degree ``tp``.

    Attributes:
        at: when it ended, seconds of the machine's monotonic clock.
        seconds: since the end of the step before it, or its own time after a break.
        kind: ``decode`` or ``prefill``.
        requests: requests in the batch.
        tokens: their context tokens (decode), or the tokens prefilled.
    """

    at: float
    seconds: float
    tp: int
    kind: str
    requests: int
    tokens: int


MOST_IN_ROUND = 1 << 16
"""Most requests of a round that is announced: policies compute with each of them."""


class BeginRound(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A client says that a round begins: what it sends from now on belongs together, until it says that it is over.

    Attributes:
        name: client of the round; the round takes the place of one of the same name.
        requests: samples that will come; None: not known.  What goes on with a sample (``pat_generated``, the later
            turns of an agent) is not another one.
        prompts: different ones among them; None: as many as requests.
        prompt_tokens: tokens of a prompt, on average; None: as in the round before.
        max_new_tokens: most tokens of a response.
        kind: what the client calls rounds of this kind, which need the same room: a short and a long round of tail
            batching are of two.
        lease_seconds: the round is over if nothing was heard of it for so long; None: as long as the engine lives, for
            a client in the engine's process.  Over HTTP there is always a lease.

    Raises:
        ValueError: more prompts than requests, or prompts without requests.
    """

    name: ClientName = CLIENT
    requests: Annotated[int, msgspec.Meta(ge=1, le=MOST_IN_ROUND)] | None = None
    prompts: Annotated[int, msgspec.Meta(ge=1, le=MOST_IN_ROUND)] | None = None
    prompt_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    max_new_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] = 4096
    kind: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{0,64}\Z")] = ""
    lease_seconds: LeaseSeconds | None = None

    def __post_init__(self) -> None:
        if self.prompts is not None and self.requests is None:
            raise ValueError(f"prompts is {self.prompts}, and requests is not given: give it, too")
        if (self.prompts or 0) > (self.requests or 0):
            raise ValueError(f"prompts is {self.prompts}, of {self.requests} requests: give at most as many")

    @classmethod
    def of_size(cls, prompts: int, responses: int, **more: Any) -> BeginRound:
        """A round of ``responses`` responses to each of ``prompts`` prompts; of unknown size, if policies do not
        compute with so many."""
        requests = prompts * responses
        return cls(**more) if requests > MOST_IN_ROUND else cls(requests=requests, prompts=prompts, **more)


class EndRound(msgspec.Struct, frozen=True, kw_only=True):
    """The round of this name is over; nothing happens if there is none."""

    name: str = CLIENT


class CalibrationTurn(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A turn of the calibration: from now on requests are made up, and the server says when to switch, to measure all
    layouts once more.

    ``over``: that was the last turn; of all turns the layouts' factors stay, and nothing else.
    """

    over: bool = False


class StepPermit(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """What a replica that works by a schedule may do: go on, hold at the first of these points, and say so with
    ``HoldReport``.

    Attributes:
        number: which ``StepPermit`` this is; ``HoldReport`` repeats it.
        steps: decode steps from now on; ``batches``: steps of any kind.

    Without a point it goes on for ever.
    """

    number: int
    steps: int | None = None
    batches: int | None = None


class HoldReport(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A replica's message that it holds, and has just reported its load.  ``steps``, ``batches``: since the
    ``StepPermit`` of this number."""

    rank: int
    number: int
    steps: int
    batches: int


class ScheduleEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of a schedule (``sglang_pat.coordinator.schedule``): when it is due, and what is to happen then.

    Everything is counted from the moment the schedule was set; at most one of the three points is given.

    Attributes:
        tp: degree to switch to; one that needs lent ranks takes them back.
        stride: the first of so many ranks works from then on, the others are lent; 1: all work.  Without ``tp`` and
            ``stride`` replicas only hold until it is due.
        arrived: not before so many requests have come in; replicas hold until then.
        step: decode steps that every replica with requests has made.  A merged replica has made as many as the one of
            its parts that made most.
        batch: due after so many steps of any kind, prefills too.
        tokens: tokens generated by all replicas, at least.
        hold: of the last entry: replicas hold afterwards, until there is another schedule.

    Raises:
        ValueError: two points; a degree and a stride.
    """

    tp: Annotated[int, msgspec.Meta(ge=1)] | None = None
    stride: Annotated[int, msgspec.Meta(ge=1)] | None = None
    arrived: Count = 0
    step: Count | None = None
    batch: Count | None = None
    tokens: Count | None = None
    hold: bool = False

    def __post_init__(self) -> None:
        points = [name for name in ("step", "batch", "tokens") if getattr(self, name) is not None]
        if len(points) > 1:
            raise ValueError(f"{' and '.join(points)} in one entry: give one of them")
        if self.tp is not None and self.stride is not None:
            raise ValueError("tp and stride in one entry: give one after the other")


class SetSchedule(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Replaces the schedule; an empty one lets replicas work freely.  Answered when it is in force.

    Under any policy requests count from here on, in schedules and in decision logs.
    """

    query_id: int
    entries: list[ScheduleEntry]


class ScheduleQuery(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A question that is answered when the schedule is over, or replaced."""

    query_id: int


class InjectPrefixes(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Puts prompts (token ids) into every replica's radix cache without computing them; not answered."""

    prompts: list[list[int]]


class TraceQuery(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Asks every rank for the steps it has led since it was last asked."""

    query_id: int


class EndedText(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A response that has ended, from its leader: others to its prompt are drafted from it.

    Attributes:
        family: number of its prompt; ``name``: the request's.
        context: the last token ids of the prompt, and ``output``: all of the response; int32.
        weight_updates: number of weight updates that the leader has applied.
    """

    rank: int
    family: int
    name: str
    context: bytes
    output: bytes
    weight_updates: int


class SiblingTexts(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Responses that ended elsewhere, for a leader and its group."""

    texts: list[EndedText]


class RankTrace(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    rank: int
    query_id: int
    steps: list[Step]


class LoadReport(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """State of one replica, from its leader.

    Attributes:
        tp, stride: degree and stride of the layout that it works in.
        received: generation requests taken from the input socket so far.
        running, waiting: requests decoding, and queued (grammar and chunked prefill included).
        tokens: KV tokens of the running requests.
        kv_used, kv_total: KV tokens in use (cache included) and in the pool.
        kv_totals: KV tokens in the pool that this rank has in each layout, by its TP degree.
        retracted: requests put back into the queue for want of KV, since the last report.
        weight_updates: number of weight updates applied.
        requests: the running and the waiting ones.
        rounds: names of the rounds that they belong to.
        finished: responses that ended since the last report.
        decoded: decode steps since the last report.
        counts: sums since the last report.
        chances, draft_seconds: how likely drafts are right, and what they cost
            (:class:`~sglang_pat.policies.snapshot.Snapshot`).
    """

    rank: int
    tp: int
    received: int
    running: int
    waiting: int
    tokens: int
    kv_used: int
    kv_total: int
    retracted: int
    weight_updates: int
    stride: int = 1
    requests: list[Running] = []
    rounds: list[str] = []
    finished: list[Finished] = []
    kv_totals: dict[int, int] = {}
    decoded: Decoded = Decoded()
    counts: StepCounts = StepCounts()
    chances: list[float] = []
    draft_seconds: float = 0.0


class StatusQuery(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    query_id: int


class Reconfigure(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Switch now; ``dry_run``: only say what that would do."""

    query_id: int
    tp: int
    dry_run: bool = False


class LendRanks(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Let the first of every ``stride`` ranks work, and lend the others; 1: take all back.

    ``client``: who asks; ``lease_seconds``: for so long the ranks are its without a word; None: as long as the engine
    lives.
    """

    query_id: int
    stride: int
    client: ClientName = CLIENT
    lease_seconds: float | None = None


class LendingQuery(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Whether ranks should be lent now, or taken back.  ``client``: who asks."""

    query_id: int
    training: Training
    client: ClientName = CLIENT


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The coordinator's answer to what the server asked with this number.

    Attributes:
        code: 200 done, 400 impossible layout, 409 not now, 500 aborted.
        answer: the status; the :class:`ScheduleState`; the steps of all ranks in the order of their ends, each a dict
            of :class:`Step`'s fields and ``rank``; fields of a :class:`~sglang_pat.policies.lending.LendingDecision`;
            those of a :class:`SwitchRecord`, None if there was nothing to do.
    """

    query_id: int
    code: int = 200
    message: str = ""
    answer: Any = None


class SwitchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One finished switch as shown in ``/pat/status``.

    Times are seconds; ``started`` is unix time.  ``phases`` holds, for each phase, the
    slowest rank.  ``pause_seconds`` runs from the first rank to stop decoding to the last one ready
    to decode again.  Requests: ``migrated`` went on decoding, ``parked`` waited with KV in the cache,
    ``recomputed`` lost theirs (``recomputed_tokens`` in all).  ``lent``: ranks that are lent in the new layout.
    """

    epoch: int
    from_tp: int
    to_tp: int
    reason: str
    started: float
    pause_seconds: float = 0.0
    phases: dict[str, float] = {}
    requests: int = 0
    migrated: int = 0
    parked: int = 0
    recomputed: int = 0
    recomputed_tokens: int = 0
    tokens: int = 0
    moved_bytes: int = 0
    lent: list[int] = []
    error: str = ""


class ScheduleState(msgspec.Struct, frozen=True, kw_only=True):
    """How far a schedule is.

    Attributes:
        entries: in all; ``done``: those carried out.
        holding: whether it is over, and replicas hold.
        switches: its switches so far, aborted ones with their error.
    """

    entries: int
    done: int
    holding: bool
    switches: list[SwitchRecord] = []


SGLANG, PAT = b"h", b"p"
"""First frame of what a rank sends to the coordinator: an object of SGLang's (pickled, as SGLang does) or ours."""

FromRank = Prepared | RankSwitched | MemoryReleased | LoadReport | EndedText | RankTrace | HoldReport
"""Messages that a rank sends on its channel to the coordinator."""

encode = msgspec.msgpack.Encoder().encode
decode_from_rank = msgspec.msgpack.Decoder(FromRank).decode
"""The message of a rank; raises ``msgspec.DecodeError`` on anything but a :data:`FromRank`."""


def guess_kind(data: bytes) -> str:
    """What :func:`decode_from_rank` could not read says it is: the name of a type, or ``unreadable``."""
    try:
        content = msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "unreadable"
    if not isinstance(content, dict):
        return "unreadable"
    kind = cast("dict[Any, Any]", content).get("type")
    return kind if isinstance(kind, str) and kind in _KINDS else "unreadable"


_KINDS = {kind.__name__ for kind in FromRank.__args__}
PROTOCOL = (Prepared.__name__, RankSwitched.__name__, MemoryReleased.__name__, HoldReport.__name__)
"""Messages that are not to be dropped: without them a switch never ends, or somebody waits for ever."""
