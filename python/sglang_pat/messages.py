"""Messages between coordinator, ranks and server.

Plain msgspec structs with an explicit encoding.  Requests that travel through the host's
own input sockets (``Prepare``, ``Switch``) are carried by the host's transport, which
broadcasts them inside each TP group; everything a rank sends to the coordinator is encoded
here.
"""

from __future__ import annotations

import msgspec


class Prepare(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Get ready for degree ``tp`` while decoding goes on."""

    epoch: int
    tp: int


class Switch(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Enter the switch to degree ``tp`` at the next iteration boundary.

    ``recompute_below``: requests with fewer KV tokens go over as tokens (``--pat-kv auto``).
    """

    epoch: int
    tp: int
    recompute_below: int = 0


class Cancel(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Forget about a prepared switch: another rank could not prepare."""

    epoch: int


class Prepared(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    rank: int
    epoch: int
    seconds: float
    error: str = ""


class RankSwitched(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """One rank's account of a switch.

    ``phases`` maps phase name to seconds; ``error`` is set if the switch was aborted.
    Requests are counted once per TP group, by its leader.
    """

    rank: int
    epoch: int
    tp: int
    phases: dict[str, float]
    moved_bytes: int = 0
    requests_in: int = 0
    requests_out: int = 0
    migrated: int = 0
    recomputed: int = 0
    tokens: int = 0
    error: str = ""


class Running(msgspec.Struct, frozen=True, array_like=True):
    """A request that is not finished: prompt tokens, tokens generated, most that may be, and its prompt's hash."""

    prompt: int
    output: int
    limit: int
    family: int


class Finished(msgspec.Struct, frozen=True, array_like=True):
    """A response of ``length`` tokens.  ``cut``: aborted or at its limit, it would have been longer."""

    length: int
    family: int
    cut: bool


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


class Floor(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The lowest degree from now on, for a round that is about to begin; the base's again with ``tp`` 0."""

    tp: int


class InjectPrefixes(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Puts prompts (token ids) into every replica's radix cache without computing them; not answered."""

    prompts: list[list[int]]


class TraceQuery(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Asks every rank for the steps it has led since it was last asked."""

    query_id: int


class RankTrace(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    rank: int
    query_id: int
    steps: list[Step]


class TraceReply(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Steps of all ranks in the order of their ends; each a dict of :class:`Step`'s fields and ``rank``."""

    query_id: int
    steps: list[dict]


class LoadReport(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """State of one replica, from its leader.

    Attributes:
        received: generation requests taken from the input socket so far.
        running, waiting: requests decoding, and queued (grammar and chunked prefill included).
        tokens: KV tokens of the running requests.
        kv_used, kv_total: KV tokens in use (cache included) and in the pool.
        retracted: requests put back into the queue for want of KV, since the last report.
        weight_updates: number of weight updates applied.
        requests: the running and the waiting ones.
        finished: responses that ended since the last report.
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
    requests: list[Running] = []
    finished: list[Finished] = []


class StatusQuery(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    query_id: int


class StatusReply(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    query_id: int
    status: dict


class Reconfigure(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    query_id: int
    tp: int


class ReconfigureReply(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """``code``: 200 done, 400 impossible layout, 409 busy, 500 aborted."""

    query_id: int
    code: int
    message: str = ""
    record: dict | None = None


class SwitchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One finished switch as shown in ``/pat/status``.

    Times are seconds; ``started`` is unix time.  ``phases`` holds, for each phase, the
    slowest rank.  ``pause_seconds`` runs from the first rank to stop decoding to the last one ready
    to decode again.
    """

    epoch: int
    from_tp: int
    to_tp: int
    reason: str
    started: float
    pause_seconds: float
    phases: dict[str, float]
    requests: int = 0
    migrated: int = 0
    recomputed: int = 0
    tokens: int = 0
    moved_bytes: int = 0
    error: str = ""


FromRank = Prepared | RankSwitched | LoadReport | RankTrace
"""Everything a rank sends on its channel to the coordinator."""

_encoder = msgspec.msgpack.Encoder()
_from_rank = msgspec.msgpack.Decoder(FromRank)


def encode(message: msgspec.Struct) -> bytes:
    return _encoder.encode(message)


def decode_from_rank(data: bytes) -> FromRank:
    """Raises ``msgspec.DecodeError`` on anything but a :data:`FromRank` message."""
    return _from_rank.decode(data)
