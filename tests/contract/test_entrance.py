"""What a request must be before any rank sees it; values that ended the engine, one by one."""

from __future__ import annotations

import inspect
import math
from types import SimpleNamespace

import pytest
from fastapi import Request

from sglang_pat.host import cpu_shim

if cpu_shim.needed():
    cpu_shim.install()

pytestmark = pytest.mark.contract

VOCAB = 512


@pytest.fixture(scope="module")
def host():
    from sglang_pat.host import entrance, sampling

    return SimpleNamespace(entrance=entrance, sampling=sampling)


def test_parameters_are_the_hosts(host):
    """A new one would be refused."""
    from sglang.srt.sampling.sampling_params import SamplingParams

    theirs = inspect.signature(SamplingParams).parameters
    ours = host.sampling.Sampling()
    assert set(host.sampling.Sampling.__struct_fields__) == set(theirs)
    assert {name: getattr(ours, name) for name in theirs} == {name: p.default for name, p in theirs.items()}


@pytest.mark.parametrize(
    "given, taken",
    [
        ({"max_new_tokens": 16.0}, {"max_new_tokens": 16}),
        ({"max_new_tokens": True}, {"max_new_tokens": 1}),
        ({"max_new_tokens": 10**30}, {"max_new_tokens": 2**31 - 1}),
        ({"max_new_tokens": None}, {"max_new_tokens": None}),
        ({"max_new_tokens": 0}, {"max_new_tokens": 0}),
        ({"temperature": True, "ignore_eos": 1}, {"temperature": 1.0, "ignore_eos": True}),
        ({"temperature": None, "top_k": None}, {"temperature": None, "top_k": None}),
        ({"stop_token_ids": [5, "6", 7.0, None]}, {"stop_token_ids": [5, 6, 7]}),
        ({"logit_bias": {"5": -math.inf, 6: 3}}, {"logit_bias": {"5": -1e9, 6: 3.0}}),
        ({"custom_params": {"pat_limit": 10**30}}, {"custom_params": {"pat_limit": 10**30}}),
        ({"stop_regex": [r"\d+\n", "(yes|no)[.!]", "a{0,64}b"]},) * 2,
        ({"json_schema": '{"a": {"b": {}}}'}, {"json_schema": '{"a": {"b": {}}}'}),
        ({}, {}),
    ],
)
def test_taken(host, given, taken):
    assert host.sampling.checked(given) == taken


REFUSED = [
    ({"max_new_tokens": 16.5}, "max_new_tokens"),
    ({"max_new_tokens": "16"}, "max_new_tokens"),
    ({"max_new_tokens": -1}, "max_new_tokens"),
    ({"min_new_tokens": 2**31}, "min_new_tokens"),
    ({"n": 0}, "n"),
    ({"n": "2"}, "n"),
    ({"temperature": math.nan}, "temperature"),
    ({"temperature": math.inf}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_k": 2**31}, "top_k"),
    ({"repetition_penalty": 1e-40}, "repetition_penalty"),
    ({"logit_bias": {"5": math.nan}}, "logit_bias"),
    ({"logit_bias": {"5": math.inf}}, "logit_bias"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"stream_interval": 0}, "stream_interval"),
    ({"stream_interval": "a"}, "stream_interval"),
    ({"sampling_seed": 2**70}, "sampling_seed"),
    ({"stop": 5}, "stop"),
    ({"stop": [None]}, "stop"),
    ({"stop": ["a"] * 5000}, "stop: 5000"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids"),
    ({"stop_token_ids": 5}, "stop_token_ids"),
    ({"json_schema": {"type": "object"}}, "json_schema"),
    ({"ebnf": "(" * 10_000}, "ebnf: brackets 10000 deep"),
    ({"regex": "a" * 2**21}, "regex: 2097152 characters"),
    ({"custom_params": {"pat_limit": True}}, "pat_limit is True"),
    ({"custom_params": {"pat_limit": 16.0}}, "pat_limit is 16.0"),
    ({"custom_params": {"pat_limit": 0}}, "pat_limit is 0"),
    ({"custom_params": [1]}, "custom_params"),
    ({"unknown": 1}, "unknown"),
    ({5: 1}, "key"),
    ([], "must be an object"),
    ("abc", "must be an object"),
]


@pytest.mark.parametrize("given, what", REFUSED, ids=lambda v: str(v)[:30])
def test_refused_in_one_line(host, given, what):
    with pytest.raises(ValueError) as caught:
        host.sampling.checked(given)
    message = str(caught.value)
    assert "sampling_params" in message and what in message and "\n" not in message and len(message) < 300


def test_deep_parameters_are_refused(host):
    """Pickle walks them on every rank, with less of the stack left than here."""
    deep: dict = {}
    for _ in range(host.sampling.MAX_DEPTH):
        deep = {"a": [deep]}
    with pytest.raises(ValueError, match="nested"):
        host.sampling.checked({"custom_params": deep})
    assert host.sampling.checked({"custom_params": {"a": [1, {"b": 2}]}})


@pytest.mark.parametrize(
    "pattern", [r"(a+)+$", r"(a|a)*b", ".*x.*y", "a?" * 30 + "a" * 30, "(a|aa){30}b", r"(a)\1", "(", r"(\w+ )*x"]
)
def test_patterns_that_take_for_ever(host, pattern):
    with pytest.raises(ValueError, match="stop_regex"):
        host.sampling.checked({"stop_regex": pattern})


@pytest.mark.parametrize("value", [True, 16.0, 10**30, 2**63, "x", [1], -5, None])
def test_length_limits_are_small_whole_numbers_whatever_was_given(host, value):
    params = SimpleNamespace(custom_params={"pat_limit": value}, max_new_tokens=7)
    limit = host.sampling.length_limit(params)
    assert type(limit) is int and 0 <= limit < 2**31
    assert limit == {10**30: 2**31 - 1, 2**63: 2**31 - 1, -5: 0}.get(value if isinstance(value, int) else None, 7)


# -- the whole request ------------------------------------------------------------------------------------


def asked(**fields):
    from sglang.srt.managers.io_struct import GenerateReqInput

    return GenerateReqInput(**({"input_ids": [7, 8]} | fields))


@pytest.mark.parametrize(
    "fields, what",
    [
        ({"rid": ""}, "rid is ''"),
        ({"rid": "a" * 10_000}, "rid is 'aaa"),
        ({"rid": 5}, "rid is '5'"),
        ({"rid": ["a", None, 5]}, "rid is '5'"),
        ({"rid": "a\ud800"}, "must be printable"),
        ({"rid": "HEALTH_CHECK_1"}, "the engine's"),
        ({"rid": "pat-0-1"}, "the engine's"),
        ({"rid": "pa"}, "the engine's"),
        ({"positional_embed_overrides": [1]}, "positional_embed_overrides"),
        ({"sampling_params": {"n": 10**9}}, "1000000000 samples"),
        ({"sampling_params": []}, "empty list"),
        ({"sampling_params": [{}, 5]}, "must be an object"),
        ({"input_ids": []}, "no prompt"),
        ({"input_ids": None, "text": ["a"] * 70_000}, "70000 samples"),
    ],
    ids=str,
)
def test_requests_over_http_are_refused(host, fields, what):
    with pytest.raises(ValueError, match=what) as caught:
        host.entrance.admit(asked(**fields), "/generate")
    assert "\n" not in str(caught.value)


def test_outputs_go_nowhere_else(host):
    request = asked(http_worker_ipc="ipc:///tmp/mine")
    host.entrance.admit(request, "/generate")
    assert request.http_worker_ipc is None


def test_the_engines_own_requests_pass(host):
    host.entrance.admit(asked(rid="pat-0-1"), None)
    host.entrance.admit(asked(rid="HEALTH_CHECK_1"), "/health_generate")
    host.entrance.admit(asked(rid="mine", sampling_params=[{"n": None}, {"n": 1}], input_ids=[[1], [2]]), "/generate")


def tokenized(params=None, **fields):
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    made = SamplingParams(**(params or {}))
    made.normalize(None)
    return TokenizedGenerateReqInput(
        **dict(
            rid="r", input_text="", input_ids=[7, 8], mm_inputs=None, sampling_params=made, return_logprob=True,
            logprob_start_len=-1, top_logprobs_num=0, token_ids_logprob=None, stream=False,
        ) | fields
    )  # fmt: skip


@pytest.fixture(scope="module")
def checker(host):
    model = SimpleNamespace(vocab_size=VOCAB, hidden_size=4)
    return host.entrance.Entrance(SimpleNamespace(model_config=model, tokenizer=SimpleNamespace(eos_token_id=2)))


@pytest.mark.parametrize("known, left", [(None, None), (["team"], {"team": "a"})])
def test_labels_that_no_metric_has_are_left_out(host, known, left):
    arguments = SimpleNamespace(tokenizer_metrics_allowed_custom_labels=known)
    request = asked(custom_labels={"team": "a", "other": "b"})
    host.entrance.Entrance(SimpleNamespace(server_args=arguments)).admit(request, "/generate")
    assert request.custom_labels == left


@pytest.mark.parametrize(
    "fields, what",
    [
        ({"input_ids": [-1]}, "input_ids: -1"),
        ({"input_ids": [VOCAB]}, f"input_ids: {VOCAB}"),
        ({"input_ids": [2**70]}, "input_ids"),
        ({"input_ids": ["a"]}, "input_ids"),
        ({"input_ids": [1.5]}, "input_ids"),
        ({"input_ids": []}, "input_ids: is empty"),
        ({"token_ids_logprob": [VOCAB]}, f"token_ids_logprob: {VOCAB}"),
        ({"token_ids_logprob": [-1]}, "token_ids_logprob: -1"),
        ({"top_logprobs_num": VOCAB + 1}, "top_logprobs_num"),
        ({"top_logprobs_num": -1}, "top_logprobs_num"),
        ({"logprob_start_len": -5}, "logprob_start_len"),
        ({"logprob_start_len": 1.0}, "logprob_start_len"),
        ({"priority": 2**70}, "priority"),
        ({"extra_key": ["a"]}, "extra_key is of type list"),
        ({"session_params": SimpleNamespace(id=[1])}, "session_params.id"),
        ({"positional_embed_overrides": [1]}, "positional_embed_overrides"),
        ({"return_routed_experts": True}, "return_routed_experts"),
        ({"input_embeds": [[1.0]]}, "input_embeds: rows of"),
        ({"input_embeds": [["a"] * 4]}, "input_embeds"),
        ({"multi_item_delimiter_indices": [2]}, "multi_item_delimiter_indices"),
        ({"custom_logit_processor": "x"}, "custom_logit_processor"),
    ],
    ids=str,
)
def test_tokenized_requests_are_refused(checker, fields, what):
    with pytest.raises(ValueError, match=what) as caught:
        checker.check(tokenized(**fields))
    assert "\n" not in str(caught.value)


def test_ordinary_requests_pass(checker):
    checker.check(tokenized(token_ids_logprob=[2, 3], top_logprobs_num=VOCAB, priority=-3, extra_key="a"))
    checker.check(tokenized(input_embeds=[[0.0] * 4] * 2, logprob_start_len=2**40))


def test_stop_tokens_that_never_come_are_left_out(checker):
    """The host uses them as indices as soon as any request of the batch has ``min_new_tokens``."""
    request = tokenized({"stop_token_ids": [5, 10**7, -1]})
    checker.check(request)
    assert request.sampling_params.stop_token_ids == {5}


@pytest.mark.parametrize("params", [{"stop": "a"}, {"stop_regex": "a"}, {"min_new_tokens": 1}])
def test_what_needs_a_tokenizer(host, params):
    model = SimpleNamespace(vocab_size=VOCAB)
    entrance = host.entrance.Entrance(SimpleNamespace(model_config=model, tokenizer=None))
    with pytest.raises(ValueError, match="tokenizer"):
        entrance.check(tokenized(params))


# -- on the ranks --------------------------------------------------------------------------------------------


def test_a_row_without_a_choice_gets_one():
    import torch

    from sglang_pat.host.runner import leave_a_choice

    logits = torch.tensor([[-math.inf, -math.inf], [math.nan, 1.0], [-math.inf, 3.0]])
    leave_a_choice(logits)
    assert logits.tolist() == [[0.0, 0.0], [0.0, 0.0], [-math.inf, 3.0]]


def test_a_grammar_that_fails_aborts_its_request_alone():
    from sglang_pat.host import grammars

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


def test_a_request_that_cannot_be_handled_is_answered_and_ends_nothing():
    from sglang.srt.managers import io_struct as io

    from sglang_pat.dropped import Dropped
    from sglang_pat.host.isolation import IsolatingDispatcher

    def broken(obj):
        raise KeyError("boom")

    dropped = Dropped()
    dispatch = IsolatingDispatcher(broken, dropped)
    answer = dispatch(tokenized(rid="mine"))
    assert isinstance(answer, io.AbortReq) and answer.rid == "mine"
    assert answer.finished_reason["type"] == "abort" and "boom" in answer.finished_reason["message"]
    assert dispatch(io.FlushCacheReqInput()).success is False
    assert dispatch(io.AbortReq(rid="x")) is None
    assert dropped.total == 3


def test_a_step_of_a_switch_that_fails_is_fatal():
    from sglang_pat import messages
    from sglang_pat.dropped import Dropped
    from sglang_pat.host.isolation import IsolatingDispatcher

    def broken(obj):
        raise RuntimeError("requests were lost")

    dispatch = IsolatingDispatcher(broken, Dropped())
    for message in (messages.Prepare(epoch=1, tp=2), messages.Switch(epoch=1, tp=2), messages.Cancel(epoch=1)):
        with pytest.raises(RuntimeError, match="requests were lost"):
            dispatch(message)


def test_every_control_request_has_an_answer_for_failure():
    """Without one its client waits for ever, and so does every switch; what leaders answer must also merge."""
    from sglang_pat.host.controls import CONTROLS, failed

    for kind, (reply, options) in CONTROLS.items():
        answers = [failed(object.__new__(kind), ValueError("boom")) for _ in range(2)]
        assert type(answers[0]) is reply
        merged = options["merge"](answers) if "merge" in options else answers[0]
        assert type(merged) is reply and not getattr(merged, "success", False)


@pytest.mark.parametrize("root", ["", "/api"])
def test_health_checks_come_in_below_a_root_path(host, root):
    """With ``--fastapi-root-path`` as well: a server whose health checks are turned away never becomes healthy."""
    request = Request({"type": "http", "path": f"{root}/health", "root_path": root, "headers": []})
    assert host.entrance.route(request) == "/health"
    host.entrance.admit(asked(rid="HEALTH_CHECK_1"), host.entrance.route(request))
