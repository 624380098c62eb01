"""Messages: round trips, and bytes that are none."""

from __future__ import annotations

import inspect
import pickle
import typing

import msgspec
import pytest

from sglang_pat import messages as m

pytestmark = pytest.mark.unit

LOAD = m.LoadReport(
    rank=3,
    tp=2,
    received=10,
    running=4,
    waiting=5,
    tokens=2**40,
    kv_used=7,
    kv_total=8,
    retracted=1,
    weight_updates=2,
    requests=[m.Running(5, 0, 2**31, 2**32 - 1)],
    finished=[m.Finished(7, 2**32 - 1, True)],
)
SWITCHED = m.RankSwitched(
    rank=1,
    epoch=2,
    tp=4,
    phases={"kv": 0.25, "drain": 1e-9},
    moved_bytes=2**50,
    requests_in=3,
    requests_out=3,
)
RECORD = m.SwitchRecord(
    epoch=1,
    from_tp=1,
    to_tp=2,
    reason="request",
    started=1.5,
    pause_seconds=0.1,
    phases={"kv": 0.1},
    error="ü",
)
ENTRY = m.ScheduleEntry(tp=2, arrived=8, step=40)
STATE = m.ScheduleState(entries=2, done=1, holding=False)

GRAMMAR = m.Grammar(kind="regex", text="[a-f]+\n×", count=3)

EXAMPLES = [
    GRAMMAR,
    ENTRY,
    STATE,
    m.SetSchedule(query_id=4, entries=[ENTRY, m.ScheduleEntry(left=3, hold=True)]),
    m.ScheduleQuery(query_id=5, wait=True),
    m.ScheduleReply(query_id=5, state=STATE),
    m.Go(number=3, steps=40, finish=True),
    m.Held(rank=1, number=3, steps=40, batches=42),
    m.Prepare(epoch=1, tp=2),
    m.Compile(epoch=1, grammars=[GRAMMAR]),
    m.Switch(epoch=1, tp=2),
    m.Cancel(epoch=1),
    m.Prepared(rank=0, epoch=1, seconds=0.5),
    m.Prepared(rank=0, epoch=1, seconds=0.5, error="rank 0: out of memory\n×"),
    m.Prepared(rank=0, epoch=1, seconds=0.5, grammars=[GRAMMAR]),
    SWITCHED,
    LOAD,
    m.RankTrace(rank=1, query_id=2, steps=[m.Step(1.5, 0.25, 2, "decode", 3, 4)]),
    m.BeginRound(name="mine", requests=64, prompts=8, prompt_tokens=500, max_new_tokens=4096),
    m.BeginRound(),
    m.EndRound(name="mine"),
    m.CalibrationTurn(over=True),
    m.InjectPrefixes(prompts=[[1, 2, 3], []]),
    m.TraceQuery(query_id=1),
    m.TraceReply(query_id=1, steps=[{"rank": 0, "at": 1.5}]),
    m.Running(1, 2, 3, 4),
    m.Finished(1, 2, False),
    m.Finished(9, 2, True, 4),
    m.Decoded(3, 0.25, 12, 900),
    m.Step(1.5, 0.25, 2, "prefill", 3, 4),
    m.StatusQuery(query_id=1),
    m.StatusReply(query_id=1, status={"layout": {"tp": 1}, "groups": [], "target": None}),
    m.Reconfigure(query_id=1, tp=2),
    m.ReconfigureReply(query_id=1, code=200, record=msgspec.to_builtins(RECORD)),
    m.ReconfigureReply(query_id=1, code=400, message="no"),
    RECORD,
]
FROM_RANK = typing.get_args(m.FromRank)


def test_every_message_has_an_example():
    defined = {cls for _, cls in inspect.getmembers(m, inspect.isclass) if issubclass(cls, msgspec.Struct)} - {
        msgspec.Struct
    }
    assert defined == {type(example) for example in EXAMPLES}


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda e: type(e).__name__)
def test_round_trip(message):
    data = m.encode(message)
    assert isinstance(data, bytes)
    assert msgspec.msgpack.decode(data, type=type(message)) == message
    # SGLang's sockets carry some of them pickled.
    assert pickle.loads(pickle.dumps(message)) == message
    if isinstance(message, FROM_RANK):
        decoded = m.decode_from_rank(data)
        assert decoded == message and type(decoded) is type(message)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda e: type(e).__name__)
def test_frozen_and_keyword_only(message):
    with pytest.raises(AttributeError):
        setattr(message, message.__struct_fields__[0], 0)
    if type(message).__struct_config__.array_like:
        return  # a row of a message
    with pytest.raises(TypeError):
        type(message)(*[getattr(message, name) for name in message.__struct_fields__])


@pytest.mark.parametrize(
    "message", [e for e in EXAMPLES if not isinstance(e, FROM_RANK)], ids=lambda e: type(e).__name__
)
def test_only_ranks_messages_come_from_ranks(message):
    with pytest.raises(msgspec.DecodeError):
        m.decode_from_rank(m.encode(message))


GOOD = m.encode(LOAD)
BAD = {
    "empty": b"",
    "truncated": GOOD[:-1],
    "trailing": GOOD + b"\0",
    "noise": b"\xc1\xff\x00",
    "pickle": pickle.dumps(LOAD),
    "not a map": msgspec.msgpack.encode([1, 2]),
    "no tag": msgspec.msgpack.encode({"rank": 0, "epoch": 1, "seconds": 0.5}),
    "unknown tag": msgspec.msgpack.encode({"type": "Boom", "rank": 0}),
    "missing field": msgspec.msgpack.encode({"type": "Prepared", "rank": 0, "epoch": 1}),
    "wrong type": msgspec.msgpack.encode({"type": "Prepared", "rank": "0", "epoch": 1, "seconds": 0.5}),
    "null": msgspec.msgpack.encode({"type": "Prepared", "rank": None, "epoch": 1, "seconds": 0.5}),
    "float for an integer": msgspec.msgpack.encode({"type": "Prepared", "rank": 0.5, "epoch": 1, "seconds": 0.5}),
    "phases not numbers": m.encode(SWITCHED).replace(msgspec.msgpack.encode(0.25), msgspec.msgpack.encode("12345678")),
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD.keys())
def test_bad_bytes(data):
    with pytest.raises(msgspec.DecodeError):
        m.decode_from_rank(data)


def test_what_bad_bytes_say_they_are():
    """Whether they may be dropped: a switch never ends without each rank's answer."""
    switch = {"not a map": False, "unknown tag": False, "noise": False, "missing field": True, "wrong type": True}
    assert {name: m.kind_of(BAD[name]) in m.PROTOCOL for name in switch} == switch
    assert m.kind_of(m.encode(LOAD)) == "LoadReport" and m.kind_of(GOOD[:-1]) == "unreadable"
    assert m.kind_of(msgspec.msgpack.encode({"type": ["Prepared"]})) == "unreadable"


@pytest.mark.parametrize("value", [2**63, 2**64 - 1])
def test_numbers_that_policies_cannot_compute_with_are_refused(value):
    report = msgspec.to_builtins(LOAD)
    for part in ([[1, 2, value, 3]], [[value, 2, 3, 4]]):
        with pytest.raises(msgspec.ValidationError):
            m.decode_from_rank(msgspec.msgpack.encode(report | {"requests": part}))


def test_every_truncation_is_refused():
    for data in (GOOD, m.encode(SWITCHED)):
        for end in range(len(data)):
            with pytest.raises(msgspec.DecodeError):
                m.decode_from_rank(data[:end])
