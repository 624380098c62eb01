"""Grammars across a switch, with SGLang's own backend: what is compiled when, and what a rebuilt request gets."""

from __future__ import annotations

import threading
from array import array
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from sglang.srt.constrained.base_grammar_backend import InvalidGrammarObject
from sglang.srt.constrained.llguidance_backend import GuidanceBackend
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams
from transformers import AutoTokenizer

from sglang_pat.host import grammars as host
from sglang_pat.messages import Grammar
from sglang_pat.rank import degrees, speculation
from sglang_pat.switch import grammars as switch_grammars
from sglang_pat.switch import requests
from sglang_pat.switch.grammars import CompiledGrammars

pytestmark = pytest.mark.contract

REGEX = "[a-f]{3}-"
KEY = ("regex", REGEX)


class Counting(GuidanceBackend):
    """Counts what is compiled, and by whom; may be told to wait."""

    def __init__(self, tokenizer) -> None:
        super().__init__(tokenizer)
        self.compiled: list[tuple[str, str]] = []
        self.gate = threading.Event()
        self.gate.set()

    def _init_value_dispatch(self, key, require_reasoning):
        self.gate.wait()
        self.compiled.append(key)
        return super()._init_value_dispatch(key, require_reasoning)


@pytest.fixture(scope="module")
def tokenizer(model):
    return AutoTokenizer.from_pretrained(model)


@pytest.fixture
def backend(tokenizer):
    backend = Counting(tokenizer)
    yield backend
    backend.gate.set()
    backend.executor.shutdown()


def request(grammar=None, **params) -> Req:
    req = Req("r", "", [5, 6], SamplingParams(**params))
    req.pat_request, req.pat_prompt, req.grammar = SimpleNamespace(input_ids=None), array("I", [5, 6]), grammar
    req.pat_sealed = None
    degrees.begin(req, tp=1)
    speculation.begin(req)
    return req


def test_what_a_leader_names():
    waits = request(Future(), regex="[a-z]")
    reqs = [request(object(), regex=REGEX), request(), request(object(), regex=REGEX), waits]
    reqs.append(request(object(), json_schema="{}"))
    assert switch_grammars.list_needed_grammars(reqs) == [
        Grammar(kind="regex", text=REGEX, count=2), Grammar(kind="json", text="{}", count=1)
    ]  # fmt: skip
    assert host.is_compiling(waits) and not host.is_compiling(reqs[0])


def test_prepared_ones_cost_nothing_in_the_pause(backend):
    grammars = CompiledGrammars(backend)
    backend.gate.clear()
    grammars.compile([Grammar(kind="regex", text=REGEX, count=3)])
    assert grammars.busy
    backend.gate.set()
    grammars.wait()
    assert not grammars.busy and backend.compiled == [KEY]
    backend.dispatch_regex = backend.executor.submit = pytest.fail  # from here on
    given = []
    for _ in range(3):
        with grammars.use_for_rebuild(None, compiling=False):
            value, ready = backend.get_cached_or_future_value(KEY, False)
        assert ready
        given.append(value)
    assert len({id(value) for value in given}) == 3, "each request has a state of its own"
    grammars.keep([request(given[0], regex=REGEX)])
    assert list(backend.cache) == [KEY] and backend.cache[KEY] not in given


def test_what_was_not_named_is_compiled_once(backend):
    grammars = CompiledGrammars(backend)
    for _ in range(4):
        with grammars.use_for_rebuild(None, compiling=False):
            assert backend.get_cached_or_future_value(KEY, False)[1]
    assert backend.compiled == [KEY]


def test_nothing_is_compiled_for_one_that_was_aborted(backend):
    """All would wait for it in the pause of a switch.

    Maybe it was aborted because its grammar takes for ever to compile.
    """
    grammars = CompiledGrammars(backend)
    with grammars.use_for_rebuild(None, compiling=False, given_up=True):
        assert backend.get_cached_or_future_value(KEY, False) == (None, True)
    assert not backend.compiled


def test_a_request_that_was_here_keeps_its_grammar(backend):
    grammars, held = CompiledGrammars(backend), object()
    with grammars.use_for_rebuild(held, compiling=False):
        assert backend.get_cached_or_future_value(KEY, False) == (held, True)
    assert not backend.compiled


@pytest.mark.parametrize("cached", [False, True])
def test_one_that_waits_goes_on_waiting(backend, cached):
    """The request waits on every rank of the new group, also where the grammar is there.

    SGLang's queues must be alike.
    """
    grammars = CompiledGrammars(backend)
    if cached:
        backend.set_cache(KEY, backend._init_value_dispatch(KEY, False))
    backend.gate.clear()
    with grammars.use_for_rebuild(None, compiling=True):
        value, ready = backend.get_cached_or_future_value(KEY, False)
    assert isinstance(value, Future) and not ready and value.done() == cached
    backend.gate.set()
    assert not isinstance(value.result(), InvalidGrammarObject)


def test_what_one_waits_for_is_compiled_once(backend):
    """A grammar that takes longer than from switch to switch would otherwise never be ready."""
    grammars, waiting = CompiledGrammars(backend), []
    backend.gate.clear()
    for _ in range(4):
        with grammars.use_for_rebuild(None, compiling=True):
            waiting.append(backend.get_cached_or_future_value(KEY, False)[0])
        grammars.keep([])  # the switch is over
    assert waiting.pop().cancel(), "this one is aborted, the others are not"
    backend.gate.set()
    assert len({id(one.result(60)) for one in waiting}) == 3, "each request has a state of its own"
    assert backend.compiled == [KEY]


def test_what_a_rank_remembers_of_them_is_bounded(backend, monkeypatch):
    monkeypatch.setattr(switch_grammars, "MAX_AWAITED", 2)
    grammars = CompiledGrammars(backend)
    for regex in "abca":
        with grammars.use_for_rebuild(None, compiling=True):
            backend.get_cached_or_future_value(("regex", regex), False)[0].result(60)
    assert [regex for _, regex in backend.compiled] == list("abca")


def test_one_that_waits_and_stays_on_its_rank_waits_for_the_same(backend):
    """The request waits for what SGLang began to compile when it came."""
    grammars = CompiledGrammars(backend)
    backend.gate.clear()
    begun, _ = backend.get_cached_or_future_value(KEY, False)

    def construct(*_) -> Req:
        value, ready = backend.get_cached_or_future_value(KEY, False)
        assert not ready, "SGLang has it wait in its queue"
        return request(value, regex=REGEX)

    scheduler = SimpleNamespace(grammars=grammars, construct=construct)
    req = request(begun, regex=REGEX)
    for _ in range(3):
        req = requests._rebuild_one(scheduler, req)
        assert req.grammar is begun
    backend.gate.set()
    assert not isinstance(begun.result(60), InvalidGrammarObject) and backend.compiled == [KEY]


def test_caches_of_a_group_are_alike(tokenizer):
    """One rank had the request, the other one got it; each had others before."""
    contents = []
    for mine in (True, False):
        backend = Counting(tokenizer)
        grammars = CompiledGrammars(backend)
        backend.set_cache(("regex", "x"), backend._init_value_dispatch(("regex", "x"), False))
        if mine:
            backend.set_cache(KEY, backend._init_value_dispatch(KEY, False))
        else:
            grammars.compile([Grammar(kind="regex", text=REGEX, count=1), Grammar(kind="regex", text="y", count=1)])
        grammars.keep([request(object(), regex=REGEX), request(object(), regex="a+"), request()])
        contents.append(sorted(backend.cache))
        assert not grammars.busy
        backend.executor.shutdown()
    assert contents[0] == contents[1] == [("regex", "[a-f]{3}-"), ("regex", "a+")]


def test_one_that_does_not_compile_says_so(backend):
    grammars = CompiledGrammars(backend)
    grammars.compile([Grammar(kind="regex", text="(", count=2)])
    grammars.wait()
    for _ in range(3):
        with grammars.use_for_rebuild(None, compiling=False):
            value, ready = backend.get_cached_or_future_value(("regex", "("), False)
        assert ready and isinstance(value, InvalidGrammarObject)


def test_a_replayed_grammar_is_where_sglang_has_it(backend, tokenizer):
    """The masks are the same also after an end of sequence that the request ignores."""
    end = tokenizer.eos_token_id
    tokens = [*tokenizer.encode("abc-", add_special_tokens=False), end]
    here, there = (backend._init_value_dispatch(KEY, False) for _ in range(2))
    for token in tokens:
        here.accept_token(token)
        here.finished = False  # as SGLang's process_batch_result_decode, of a request that goes on
    host.replay(there, tokens)
    assert here.finished == there.finished and here.is_terminated() == there.is_terminated()
    masks = []
    for grammar in (here, there):
        mask = grammar.allocate_vocab_mask(503, 1, "cpu")
        mask.fill_(-1)
        try:
            grammar.fill_vocab_mask(mask, 0)
        except Exception as error:
            masks.append(str(error))
        else:
            masks.append(mask.tolist())
    assert masks[0] == masks[1]


def test_without_a_tokenizer_there_are_none():
    grammars = CompiledGrammars(None)
    grammars.compile([])
    grammars.keep([request()])
    assert not grammars.busy
