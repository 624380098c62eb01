"""Messages: round trips, and bytes that are none."""

from __future__ import annotations

import typing

import msgspec
import pytest

from sglang_pat import messages as m

pytestmark = pytest.mark.unit

LOAD = m.LoadReport(
    rank=3, tp=2, received=10, running=4, waiting=5, tokens=2**40, kv_used=7, kv_total=8, retracted=1, weight_updates=2,
    requests=[m.Running(5, 0, 2**31, 2**32 - 1)], finished=[m.Finished(7, 2**32 - 1, True)],
)  # fmt: skip
SWITCHED = m.RankSwitched(
    rank=1, epoch=2, phases={"kv": 0.25, "drain": 1e-9}, moved_bytes=2**50, requests_in=3, requests_out=3
)
FROM_RANK = [
    m.Prepared(rank=0, epoch=1, seconds=0.5, grammars=[m.Grammar(kind="regex", text="[a-f]+\n×", count=3)]),
    SWITCHED,
    m.MemoryReleased(rank=1, epoch=2, bytes=2**40, error="×"),
    LOAD,
    m.EndedText(rank=1, family=2**32 - 1, name="×", context=b"\x00\xff", output=b"", weight_updates=2),
    m.RankTrace(rank=1, query_id=2, steps=[m.Step(1.5, 0.25, 2, "decode", 3, 4)]),
    m.HoldReport(rank=1, number=3, steps=40, batches=42),
]


def test_what_a_rank_sends_is_read_as_it_was():
    for message in FROM_RANK:
        decoded = m.decode_from_rank(m.encode(message))
        assert decoded == message and type(decoded) is type(message)
    assert {type(message) for message in FROM_RANK} == set(typing.get_args(m.FromRank))


GOOD = m.encode(LOAD)
BAD = {
    "truncated": (GOOD[:-1], "unreadable"),
    "noise": (b"\xc1\xff\x00", "unreadable"),
    "not a map": (msgspec.msgpack.encode([1, 2]), "unreadable"),
    "a type that is no text": (msgspec.msgpack.encode({"type": ["Prepared"]}), "unreadable"),
    "unknown tag": (msgspec.msgpack.encode({"type": "Boom", "rank": 0}), "unreadable"),
    "to ranks": (m.encode(m.Prepare(epoch=1, tp=2)), "unreadable"),
    "missing field": (msgspec.msgpack.encode({"type": "Prepared", "rank": 0, "epoch": 1}), "Prepared"),
    "wrong type": (
        msgspec.msgpack.encode({"type": "HoldReport", "rank": "0", "number": 1, "steps": 1, "batches": 1}),
        "HoldReport",
    ),
}


@pytest.mark.parametrize(("data", "kind"), BAD.values(), ids=BAD)
def test_bad_bytes_and_what_they_say_they_are(data, kind):
    """What they say decides whether a message may be dropped: a switch never ends without each rank's answer."""
    with pytest.raises(msgspec.DecodeError):
        m.decode_from_rank(data)
    assert m.guess_kind(data) == kind and m.guess_kind(GOOD) == "LoadReport"
    assert (kind in m.PROTOCOL) == (kind != "unreadable")


@pytest.mark.parametrize("value", [2**63, 2**64 - 1])
def test_numbers_that_policies_cannot_compute_with_are_refused(value):
    report = msgspec.to_builtins(LOAD)
    for part in ([[1, 2, value, 3]], [[value, 2, 3, 4]]):
        with pytest.raises(msgspec.ValidationError):
            m.decode_from_rank(msgspec.msgpack.encode(report | {"requests": part}))
