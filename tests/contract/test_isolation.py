"""A message that cannot be read is dropped by the coordinator; one of a switch ends it."""

from __future__ import annotations

import pickle
from collections import deque

import msgspec
import pytest

from sglang_pat import messages
from sglang_pat.dropped import Dropped

pytestmark = pytest.mark.contract

REPORT = messages.LoadReport(
    rank=1, tp=1, received=3, running=1, waiting=0, tokens=9, kv_used=9, kv_total=99, retracted=0, weight_updates=0
)


class Socket:
    """What the coordinator reads from: frames, or a pickle."""

    def __init__(self, *content) -> None:
        self._content = deque(content)

    def poll(self, timeout: int) -> bool:
        return bool(self._content)

    def recv_multipart(self) -> list[bytes]:
        return self._content.popleft()

    def recv_pyobj(self):
        return pickle.loads(self._content.popleft())


class Heard:
    """Stands for the coordinator: notes what reaches it."""

    def __init__(self) -> None:
        self.events: list = []

    def __getattr__(self, name: str):
        return lambda *args: self.events.append((name, args[:-1]))


def from_ranks(*frames) -> tuple[list, Dropped]:
    from sglang_pat.sglang.coordinator import _drain_ranks

    heard, dropped = Heard(), Dropped()
    _drain_ranks(heard, Socket(*map(list, frames)), 0.0, dropped)
    return heard.events, dropped


GOOD = (b"p", b"1", messages.encode(REPORT))
BAD = {
    "noise": (b"p", b"1", b"\xc1\xff"),
    "no frames": (b"p",),
    "too many frames": (b"p", b"1", b"", b""),
    "no rank": (b"p", b"x", messages.encode(REPORT)),
    "not a report": (b"p", b"1", msgspec.msgpack.encode({"type": "LoadReport", "rank": "one"})),
    "a limit that is no number": (
        b"p", b"1", msgspec.msgpack.encode(msgspec.to_builtins(REPORT) | {"requests": [[1, 2, 16.0, 4]]}),
    ),
    "no pickle": (b"h", b"1", b"\x80\x05junk"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_a_rank_sends_is_dropped_if_it_cannot_be_read(name):
    events, dropped = from_ranks(GOOD, BAD[name], GOOD)
    assert events == [("rank_message", (REPORT,))] * 2, "what comes after it is heard"
    assert dropped.total == 1


@pytest.mark.parametrize("kind", ["Prepared", "RankSwitched"])
def test_a_rank_that_cannot_be_understood_in_a_switch_ends_the_engine(kind):
    with pytest.raises(msgspec.ValidationError):
        from_ranks((b"p", b"1", msgspec.msgpack.encode({"type": kind, "rank": 1})))


def test_an_error_while_a_switch_is_accounted_for_ends_the_engine():
    from sglang_pat.sglang.coordinator import _drain_ranks

    class Lost(Heard):
        def rank_message(self, message, now):
            raise RuntimeError("requests were lost")

    with pytest.raises(RuntimeError, match="requests were lost"):
        _drain_ranks(Lost(), Socket(list(GOOD)), 0.0, Dropped())


def test_what_the_server_sends_is_dropped_if_it_cannot_be_read():
    from sglang_pat.sglang.coordinator import _drain_server

    heard, dropped = Heard(), Dropped()
    status = messages.StatusQuery(query_id=1)
    _drain_server(heard, Socket(b"\x80\x05junk", pickle.dumps(status)), 0.0, dropped)
    assert [name for name, _ in heard.events] == ["status"] and dropped.total == 1


def test_a_report_that_cannot_be_made_is_replaced_by_a_shorter_one():
    """The coordinator routes by the numbers; what it knows of each request comes with the next report."""
    from types import SimpleNamespace

    from sglang_pat.sglang.rank.load_reports import LoadReporter

    sent = []

    def send(report):
        messages.encode(report)  # as the channel does
        sent.append(report)

    req = SimpleNamespace(origin_input_ids=[1], output_ids=[2], pat_limit=10**30, pat_family=5, pat_since=0)
    batch = SimpleNamespace(reqs=[req], seq_lens_sum=2)
    scheduler = SimpleNamespace(
        rank=0, tp_size=1, dropped=Dropped(), channel=SimpleNamespace(send=send), chunked_req=None,
        running_batch=batch, waiting_queue=[], grammar_manager=SimpleNamespace(grammar_queue=[]),
        layouts=SimpleNamespace(weight_version=0, kv_totals={1: 99}),
        token_to_kv_pool_allocator=SimpleNamespace(size=10, available_size=lambda: 8),
    )  # fmt: skip
    reporter = LoadReporter(scheduler)
    reporter.look(batch)
    assert scheduler.dropped.total == 1
    assert [(report.running, report.kv_used, report.requests) for report in sent] == [(1, 2, [])]


def test_control_requests_reach_ranks_without_what_a_client_put_into_them():
    """SGLang's loop asks every request's id whether it is a health check's, and dies of one that is no text."""
    from sglang.srt.managers import io_struct as io

    from sglang_pat.sglang.controls import classify

    for rid in (["a", "b"], 7, "a"):
        (control,) = classify(io.FlushCacheReqInput(rid=rid, http_worker_ipc="ipc:///tmp/nobody"))
        assert control.obj.rid is None and control.obj.http_worker_ipc is None
        (abort,) = classify(io.AbortReq(rid=rid))
        assert isinstance(abort.obj.rid, str)
    (abort,) = classify(io.AbortReq(rid="a"))
    assert abort.obj.rid == "a"


def test_a_decision_log_on_a_full_disk_ends_and_the_coordinator_goes_on(caplog):
    from sglang_pat.sglang.coordinator import EventLog

    log = EventLog("/dev/full")
    for _ in range(3):
        log.write({"event": "length"})
    assert [record.getMessage() for record in caplog.records] == [
        "--pat-log /dev/full: No space left on device; nothing more is written to it"
    ]
