"""A message that cannot be read or handled is dropped by whoever gets it; one of a switch ends the engine."""

from __future__ import annotations

import logging
import math
import pickle
from collections import deque
from types import SimpleNamespace

import msgspec
import pytest
import torch
import zmq

from sglang_pat import messages
from sglang_pat.dropped import FATAL, LOG_SECONDS, Dropped, IsolatingDispatcher, ReadableSocket
from sglang_pat.layout import ParallelLayout

from .requests_made import make_message, tokenize

pytestmark = pytest.mark.contract

REPORT = messages.LoadReport(
    rank=1, tp=1, received=3, running=1, waiting=0, tokens=9, kv_used=9, kv_total=99, retracted=0, weight_updates=0
)


class Socket:
    """What a process reads from: frames, or a pickle."""

    def __init__(self, *content) -> None:
        self._content = deque(content)

    def poll(self, timeout: int) -> bool:
        return bool(self._content)

    def recv_multipart(self) -> list[bytes]:
        return self._content.popleft()

    def recv(self, flags: int = 0) -> bytes:
        if not self._content:
            raise zmq.Again()
        return self._content.popleft()

    def recv_pyobj(self, flags: int = 0):
        return pickle.loads(self.recv(flags))


class Heard:
    """Stands for the coordinator: notes what reaches it."""

    config = SimpleNamespace(num_ranks=2)

    def __init__(self) -> None:
        self.events: list = []

    def __getattr__(self, name: str):
        return lambda *args: self.events.append((name, args[:-1]))


def hear_frames(*frames) -> tuple[list, Dropped]:
    from sglang_pat.coordinator.process import _drain_ranks

    heard, dropped = Heard(), Dropped()
    _drain_ranks(heard, Socket(*map(list, frames)), 0.0, dropped)
    return heard.events, dropped


GOOD = (b"p", b"1", messages.encode(REPORT))
BAD = {
    "noise": (b"p", b"1", b"\xc1\xff"),
    "no frames": (b"p",),
    "too many frames": (b"p", b"1", b"", b""),
    "no rank": (b"p", b"x", messages.encode(REPORT)),
    "of a rank that is not there": (b"h", b"7", pickle.dumps("a reply")),
    "of another rank than it says": (b"p", b"0", messages.encode(REPORT)),
    "not a report": (b"p", b"1", msgspec.msgpack.encode({"type": "LoadReport", "rank": "one"})),
    "a limit that is no number": (
        b"p", b"1", msgspec.msgpack.encode(msgspec.to_builtins(REPORT) | {"requests": [[1, 2, 16.0, 4]]}),
    ),
    "no pickle": (b"h", b"1", b"\x80\x05junk"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_a_rank_sends_is_dropped_if_it_cannot_be_read(name):
    events, dropped = hear_frames(GOOD, BAD[name], GOOD)
    assert events == [("handle_rank_message", (REPORT,))] * 2, "what comes after it is heard"
    assert dropped.total == 1


@pytest.mark.parametrize("kind", ["Prepared", "RankSwitched"])
def test_a_rank_that_cannot_be_understood_in_a_switch_ends_the_engine(kind):
    with pytest.raises(msgspec.ValidationError):
        hear_frames((b"p", b"1", msgspec.msgpack.encode({"type": kind, "rank": 1})))


def test_an_error_while_a_switch_is_accounted_for_ends_the_engine():
    from sglang_pat.coordinator.process import _drain_ranks

    class Lost(Heard):
        def handle_rank_message(self, message, now):
            raise RuntimeError("requests were lost")

    with pytest.raises(RuntimeError, match="requests were lost"):
        _drain_ranks(Lost(), Socket(list(GOOD)), 0.0, Dropped())


def test_what_the_server_sends_is_dropped_if_it_cannot_be_read():
    from sglang_pat.coordinator.process import _drain_server

    heard, dropped = Heard(), Dropped()
    status = messages.StatusQuery(query_id=1)
    _drain_server(heard, Socket(b"\x80\x05junk", pickle.dumps(status)), 0.0, dropped)
    assert [name for name, _ in heard.events] == ["handle_status_query"] and dropped.total == 1


JUNK = (b"", b"\x80\x05junk", pickle.dumps(messages.StatusQuery)[:-9], b"cnowhere\nnobody\n.")


def test_outputs_that_cannot_be_read_are_dropped():
    """The detokenizer and the server drop them alike."""
    from sglang_pat.switch.order import NumberedOutput, OrderedReceiver

    frames = (JUNK[0], pickle.dumps(NumberedOutput(0, 1, None, "first")), *JUNK[1:], pickle.dumps("second"))
    dropped = Dropped()
    receiver = OrderedReceiver(Socket(*frames), dropped)
    assert [receiver.recv_pyobj(), receiver.recv_pyobj()] == ["first", "second"] and dropped.total == len(JUNK)


def test_a_leader_drops_what_it_cannot_read():
    """SGLang reads until the socket is empty, and that is the one error that it expects."""
    dropped = Dropped()
    socket = ReadableSocket(Socket(*JUNK[:2], pickle.dumps("first"), *JUNK[2:]), dropped)
    assert socket.recv_pyobj(zmq.NOBLOCK) == "first"
    with pytest.raises(zmq.Again):
        socket.recv_pyobj(zmq.NOBLOCK)
    assert dropped.total == len(JUNK) and not socket.poll(0), "everything else is the socket's"


def test_the_detokenizer_drops_what_it_does_not_know_but_no_batch():
    """The requests of a batch that is lost would wait for ever."""
    from sglang.srt.managers import io_struct as io
    from sglang.srt.managers.detokenizer_manager import DetokenizerManager

    from sglang_pat.host.process import AdaptiveDetokenizerManager

    manager = AdaptiveDetokenizerManager.__new__(AdaptiveDetokenizerManager)
    manager.dropped = Dropped()
    manager.init_request_dispatcher()
    assert isinstance(manager, DetokenizerManager)
    assert manager._request_dispatcher({"what": "is this"}) is None and manager.dropped.total == 1
    with pytest.raises((AttributeError, TypeError)):
        manager._request_dispatcher(io.BatchTokenIDOutput.__new__(io.BatchTokenIDOutput))


def test_the_server_drops_what_it_cannot_handle(monkeypatch):
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.utils import TypeBasedDispatcher

    from sglang_pat.server import tokenizer

    def made(self, server_args, port_args) -> None:
        self.server_args, self.pat_dropped = server_args, Dropped()
        self._result_dispatcher = TypeBasedDispatcher([])
        self.signal_handler_class = self.is_pause_cond = self.model_update_lock = None

    monkeypatch.setattr(TokenizerManager, "__init__", made)
    args = SimpleNamespace(
        enable_metrics=False,
        spec=SimpleNamespace(config=SimpleNamespace(calibrates=False, log=None)),
    )
    manager = tokenizer.AdaptiveTokenizerManager(args, None)
    manager._result_dispatcher(("what", "is this"))
    answers: list = []
    manager._pat_waiting[3] = SimpleNamespace(done=lambda: False, set_result=answers.append)
    manager._result_dispatcher(messages.Reply(query_id=[]))
    assert manager.pat_dropped.total == 2
    manager._result_dispatcher(messages.Reply(query_id=3))
    assert len(answers) == 1


def test_a_report_that_cannot_be_made_is_replaced_by_a_shorter_one():
    """The coordinator routes by the numbers; what it knows of each request comes with the next report."""
    from sglang_pat.rank.load_reports import LoadReporter

    sent = []

    def send(report):
        messages.encode(report)  # as the channel does
        sent.append(report)

    req = SimpleNamespace(origin_input_ids=[1], output_ids=[2], pat_limit=10**30, pat_family=5, pat_since=0)
    batch = SimpleNamespace(reqs=[req], seq_lens_sum=2, seq_lens_cpu=torch.tensor([2]))
    scheduler = SimpleNamespace(
        rank=0, tp_size=1, dropped=Dropped(), channel=SimpleNamespace(send=send), chunked_req=None,
        running_batch=batch, waiting_queue=[], grammar_manager=SimpleNamespace(grammar_queue=[]),
        layouts=SimpleNamespace(weight_version=0, kv_totals={1: 99}, layout=ParallelLayout(1, 2)),
        speculation=SimpleNamespace(chances=[], draft_seconds=0.0),
        token_to_kv_pool_allocator=SimpleNamespace(size=10, available_size=lambda: 8),
    )  # fmt: skip
    reporter = LoadReporter(scheduler)
    reporter.report_if_due(batch)
    assert scheduler.dropped.total == 1
    assert [(report.running, report.kv_used, report.requests) for report in sent] == [(1, 2, [])]


def test_control_requests_reach_ranks_without_what_a_client_put_into_them():
    """SGLang's loop asks every request's id whether it is a health check's, and dies of one that is no text."""
    from sglang.srt.managers import io_struct as io

    from sglang_pat.coordinator.process import classify

    for rid in (["a", "b"], 7, "a"):
        (control,) = classify(io.FlushCacheReqInput(rid=rid, http_worker_ipc="ipc:///tmp/nobody"))
        assert control.obj.rid is None and control.obj.http_worker_ipc is None
        (abort,) = classify(io.AbortReq(rid=rid))
        assert isinstance(abort.obj.rid, str)
    (abort,) = classify(io.AbortReq(rid="a"))
    assert abort.obj.rid == "a"


def test_a_decision_log_on_a_full_disk_ends_and_the_coordinator_goes_on(caplog):
    from sglang_pat.coordinator.process import EventLog

    log = EventLog("/dev/full")
    for _ in range(3):
        log.write({"event": "length"})
    assert [record.getMessage() for record in caplog.records] == [
        "--pat-log /dev/full: No space left on device; nothing more is written to it"
    ]


# -- on a rank ------------------------------------------------------------------------------------------------


def test_a_row_without_a_choice_gets_one():
    import torch

    from sglang_pat.host.fixes import grammars

    logits = torch.tensor([[-math.inf, -math.inf], [math.nan, 1.0], [-math.inf, 3.0]])
    grammars.unmask_empty_rows(logits)
    assert logits.tolist() == [[0.0, 0.0], [0.0, 0.0], [-math.inf, 3.0]]


def test_a_grammar_that_fails_aborts_its_request_alone():
    from sglang_pat.host.fixes import grammars

    class Grammar:
        finished = False

        def fill_vocab_mask(self, mask, idx):
            raise ValueError("too large")

    failing, fine = SimpleNamespace(grammar=Grammar(), to_finish=None), SimpleNamespace(grammar=None, to_finish=None)
    info = SimpleNamespace(grammars=[failing.grammar, None])
    grammars.guard(info)
    info.grammars[0].fill_vocab_mask(None, 0)
    assert info.grammars[0].finished is False and info.grammars[1] is None
    grammars.abort_failed([failing, fine])
    assert failing.to_finish.to_json()["status_code"] == 400 and "too large" in failing.to_finish.message
    assert fine.to_finish is None


def test_a_request_that_cannot_be_handled_is_answered_and_a_step_of_a_switch_is_fatal():
    from sglang.srt.managers import io_struct as io

    from sglang_pat.host.controls import make_error_reply

    def broken(obj):
        raise KeyError("boom")

    dropped = Dropped()
    dispatch = IsolatingDispatcher(broken, dropped, FATAL, make_error_reply)
    answer = dispatch(tokenize(rid="mine"))
    assert isinstance(answer, io.AbortReq) and answer.rid == "mine"
    assert answer.finished_reason["type"] == "abort" and "boom" in answer.finished_reason["message"]
    assert dispatch(io.FlushCacheReqInput()).success is False
    assert dispatch(io.AbortReq(rid="x")) is None
    assert dropped.total == 3
    for message in (messages.Prepare(epoch=1, tp=2), messages.Switch(epoch=1, tp=2), messages.Cancel(epoch=1)):
        with pytest.raises(KeyError):
            dispatch(message)


def test_every_control_request_has_an_answer_for_failure():
    """A client without an answer waits for ever, and so does every switch.

    What leaders answer must also merge.
    """
    from sglang_pat.coordinator.process import classify
    from sglang_pat.host.controls import CONTROLS, get_error, make_error_reply

    for kind, (reply, options) in CONTROLS.items():
        answers = [make_error_reply(make_message(kind), ValueError("boom")) for _ in range(2)]
        assert type(answers[0]) is reply
        merged = options["merge"](answers) if "merge" in options else answers[0]
        assert type(merged) is reply and not getattr(merged, "success", False)
        if options.get("needs_base"):  # the coordinator's own answer, where there is no way to the base layout
            asked = make_message(kind)
            (control,) = classify(asked)
            refused = control.refusal("no way")
            assert type(refused) is reply and get_error(refused) == "RuntimeError: no way"
            assert not getattr(refused, "success", False)


# -- counted, and said in the log now and then ------------------------------------------------------------------


def test_all_are_counted_and_a_flood_is_logged_once_a_second(caplog):
    now = [0.0]
    dropped = Dropped(clock=lambda: now[0])
    with caplog.at_level(logging.ERROR):
        for _ in range(50):
            dropped.note("LoadReport", ValueError("no"))
        assert dropped.total == 50 and len(caplog.records) == 1
        now[0] = LOG_SECONDS
        dropped.note("LoadReport", ValueError("again"))
        dropped.note("Finished", ValueError("no"))
    assert [record.getMessage() for record in caplog.records] == [
        "dropped a message: LoadReport: no", "dropped a message: LoadReport (and 49 more before it): again",
        "dropped a message: Finished: no",
    ]  # fmt: skip
