"""Which requests are taken, and as what: values that end a rank of SGLang are refused in one line before it."""

from __future__ import annotations

import inspect
import math
import re
import time
from array import array
from types import SimpleNamespace

import pytest
from fastapi import Request

from sglang_pat.host import adapter
from sglang_pat.host.fixes import request_validation as validation
from sglang_pat.host.fixes import stop_patterns
from sglang_pat.messages import ROUND_MARK, count_prefix_tokens, get_length_limit

from .requests_made import ask, make_message, tokenize

pytestmark = pytest.mark.contract

VOCAB = 512
UNKNOWN = {
    "v0_5_23": (
        "beam_width watermark "  # a switch does not carry beams, and watermarks are refused at start
        # SGLang's own
        "stop_strs stop_regex_strs stop_str_max_len stop_regex_max_len is_normalized ebnf_full_assistant"
    )
}
"""Parameters that are refused, by the adapter of the version that has them."""
TOKENIZER = SimpleNamespace(eos_token_id=2)


def test_parameters_are_sglangs():
    """A parameter that is new in SGLang would be refused."""
    from sglang.srt.sampling.sampling_params import TOP_K_ALL, SamplingParams

    theirs = {name: parameter.default for name, parameter in inspect.signature(SamplingParams).parameters.items()}
    theirs |= {"top_k": -1} if theirs["top_k"] == TOP_K_ALL else {}  # two ways to say it
    ours = validation.Sampling()
    assert theirs.keys() - ours.__struct_fields__ == set(UNKNOWN.get(adapter.FOLDER, "").split())
    assert {name: getattr(ours, name) for name in ours.__struct_fields__} == {
        name: value for name, value in theirs.items() if name in ours.__struct_fields__
    }


@pytest.mark.parametrize(
    "given, taken",
    [
        ({"max_new_tokens": 16.0}, {"max_new_tokens": 16}),
        ({"max_new_tokens": True}, {"max_new_tokens": 1}),
        ({"max_new_tokens": 10**30}, {"max_new_tokens": 2**31 - 1}),
        ({"max_new_tokens": None, "top_k": None}, {"max_new_tokens": None, "top_k": None}),
        ({"temperature": True, "ignore_eos": 1}, {"temperature": 1.0, "ignore_eos": True}),
        ({"stop_token_ids": [5, "6", 7.0, None]}, {"stop_token_ids": [5, 6, 7]}),
        ({"logit_bias": {"5": -math.inf, 6: 3}}, {"logit_bias": {"5": -1e9, 6: 3.0}}),
        ({"custom_params": {"pat_limit": 10**30, "a": [1, {"b": 2}]}},) * 2,
        ({"stop_regex": [r"\d+\n", "(yes|no)[.!]", "a{0,64}b"]},) * 2,
        ({"json_schema": '{"a": {"b": {}}}'},) * 2,
        ({}, {}),
    ],
)
def test_parameters_taken(given, taken):
    assert validation.check_sampling_params(given) == taken


def nest(depth: int) -> dict:
    return {"a": [nest(depth - 1)]} if depth else {}


PARAMETERS = [
    ({"max_new_tokens": -1}, "max_new_tokens"),
    ({"n": 0}, "n"),
    ({"temperature": math.nan}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"repetition_penalty": 1e-40}, "repetition_penalty"),
    ({"logit_bias": {"5": math.nan}}, "logit_bias"),
    ({"sampling_seed": 2**70}, "sampling_seed"),
    ({"stop": [None]}, "stop"),
    ({"stop": ["a"] * 5000}, "stop: 5000"),
    ({"stop": ["a" * 1500, "b" * 1500]}, "stop: 3000 characters"),
    ({"stop_regex": ["a" * 2**18] * 8}, "stop_regex: 2097152 characters"),
    ({"stop_regex": ["a*b"] * 16}, "stop_regex"),
    ({"ebnf": "(" * 10_000}, "ebnf: brackets 10000 deep"),
    ({"regex": "a" * 2**21}, "regex: 2097152 characters"),
    ({"custom_params": {"pat_limit": True}}, "pat_limit is True"),
    ({"custom_params": {"pat_generated": -1}}, "pat_generated is -1"),
    ({"custom_params": {"pat_drafts": 0.5}}, "pat_drafts is 0.5"),
    ({"custom_params": {"pat_round": "a\n"}}, "pat_round is 'a\\n', must be the name of a round"),
    ({"custom_params": {"pat_round": 3}}, "pat_round is 3, must be the name of a round"),
    ({"custom_params": nest(60)}, "custom_params: nested"),
    ({"unknown": 1}, "unknown"),
    ({5: 1}, "key"),
    ("abc", "must be an object"),
]
REQUESTS = [
    ({"rid": ["a", None, "b" * 10_000]}, "rid is 'bbb"),
    ({"rid": "a\ud800"}, "must be printable"),
    ({"rid": "HEALTH_CHECK_1"}, "the engine's"),
    ({"rid": "pat-0-1"}, "the engine's"),
    ({"positional_embed_overrides": [1]}, "positional_embed_overrides"),
    ({"sampling_params": {"n": 10**9}}, "1000000000 samples"),
    ({"sampling_params": []}, "empty list"),
    ({"sampling_params": [{}, 5]}, "must be an object"),
    ({"sampling_params": [{"stop_regex": [f"{i:04}" * 250]} for i in range(17)]}, "16384 characters for all samples"),
    ({"input_ids": []}, "no prompt"),
    ({"input_ids": None, "input_embeds": [[1.0]]}, "input_embeds: not with"),
    ({"input_ids": None, "text": ["a"] * 70_000}, "70000 samples"),
    ({"input_ids": None, "text": ["a", "a\ud800"]}, "text[1]: character 1 is half of a surrogate pair"),
    ({"input_ids": None, "text": ["a", 5]}, "text[1] is 5, must be a string"),
]
TOKENIZED = [
    ({"input_ids": [VOCAB]}, f"input_ids: {VOCAB}"),
    ({"input_ids": [2**70]}, "input_ids"),
    ({"input_ids": []}, "input_ids: is empty"),
    ({"token_ids_logprob": [VOCAB]}, f"token_ids_logprob: {VOCAB}"),
    ({"top_logprobs_num": VOCAB + 1}, "top_logprobs_num"),
    ({"priority": 2**70}, "priority"),
    ({"extra_key": ["a"]}, "extra_key is of type list"),
    ({"session_params": SimpleNamespace(id=[1])}, "session_params.id"),
    ({"positional_embed_overrides": [1]}, "positional_embed_overrides"),
    ({"multi_item_delimiter_indices": [2]}, "multi_item_delimiter_indices"),
    ({"custom_logit_processor": "x"}, "custom_logit_processor"),
    ({"return_routed_experts": True}, "not without --enable-return-routed-experts"),
    ({"routed_experts_start_len": 10**6}, "routed_experts_start_len is 1000000"),
    ({"return_indexer_topk": True}, "return_indexer_topk"),
]


@pytest.mark.parametrize(
    "check, given, what",
    [(validation.check_sampling_params, *case) for case in PARAMETERS]
    + [(lambda fields: validation.check_request(ask(**fields), "/generate"), *case) for case in REQUESTS]
    + [(lambda fields: validation.check_tokenized(tokenize(**fields), VOCAB, TOKENIZER), *case) for case in TOKENIZED],
    ids=lambda value: "" if callable(value) else str(value)[:40],
)
def test_refused_in_one_line(check, given, what):
    with pytest.raises(ValueError) as caught:
        check(given)
    message = str(caught.value)
    assert what in message and "\n" not in message and len(message) < 300


@pytest.mark.parametrize("params", [{"stop": "a"}, {"stop_regex": "a"}, {"min_new_tokens": 1}])
def test_what_needs_a_tokenizer(params):
    with pytest.raises(ValueError, match="need a tokenizer|skip_tokenizer_init"):
        validation.check_tokenized(tokenize(params), VOCAB, None)


def test_requests_taken():
    same = [{"stop_regex": "a" * 1000}] * 1000
    validation.check_request(ask(rid="mine", sampling_params=same, input_ids=[[1]] * 1000), "/generate")
    validation.check_request(ask(rid="mine", sampling_params=[{"n": None}] * 2, input_ids=[[1], [2]]), "/generate")
    validation.check_request(ask(rid="pat-0-1"), None)  # the engine's own
    validation.check_request(ask(rid="HEALTH_CHECK_1"), "/health_generate")
    request = ask(http_worker_ipc="ipc:///tmp/mine")
    validation.check_request(request, "/generate")
    assert request.http_worker_ipc is None, "outputs go nowhere else"
    for fields in (
        dict(token_ids_logprob=[2, 3], top_logprobs_num=VOCAB, priority=-3, extra_key="a"),
        dict(logprob_start_len=2**40),
    ):
        validation.check_tokenized(tokenize(**fields), VOCAB, TOKENIZER)
    request = tokenize({"stop_token_ids": [5, 10**7, -1]})
    validation.check_tokenized(request, VOCAB, TOKENIZER)
    assert request.sampling_params.stop_token_ids == {5}, "SGLang uses them as indices"


@pytest.mark.parametrize("root", ["", "/api"])
def test_health_checks_come_in_below_a_root_path(root):
    """``--fastapi-root-path`` sets the path.

    A server whose health checks are turned away never becomes healthy.
    """
    request = Request({"type": "http", "path": f"{root}/health", "root_path": root, "headers": []})
    assert validation.find_route(request) == "/health"


@pytest.mark.parametrize("known, left", [(None, None), (["team"], {"team": "a"})])
def test_labels_that_no_metric_has_are_left_out(known, left):
    request = ask(custom_labels={"team": "a", "other": "b"})
    validation.drop_unknown_labels(request, SimpleNamespace(tokenizer_metrics_allowed_custom_labels=known))
    assert request.custom_labels == left


# -- stop patterns --------------------------------------------------------------------------------------------

ENDLESS = [
    r"(a+)+$", r"(a|a)*b", ".*x.*y", "a?" * 30 + "a" * 30, "(a|aa){30}b", r"(a)\1", "(", r"(\w+ )*x",
    r"(.+)+\x00(?!a{5000,})", r"(.+)+\x00a{5000,}", "(?:(?:(?:(?=a)){1000}){1000}){1000}", "(){1000000000}",
    "a*a{2000}b", "(?:(?:(?:(?:a?)?)?)?){8}b", "(a)*b", r".*.{0,2}\x00", "." + r"*.{0,2}\x00" * 2,
]  # fmt: skip
USUAL = [
    r"\d+\n", "(yes|no)[.!]", "a{0,64}b", "<answer>.*</answer>", r"\n\n(Q|A):", r"\b(foo|bar|baz)\b", "a{5000,}",
    r"\*\*Final Answer\*\*[\s\S]*I hope it is correct", "(?:ab)*c", "(?i)stop.*here",
]  # fmt: skip


@pytest.mark.parametrize("pattern", ENDLESS)
def test_endless_patterns_are_refused(pattern):
    with pytest.raises(ValueError, match="stop_regex") as caught:
        stop_patterns.check_patterns([pattern])
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize("pattern", USUAL)
def test_usual_patterns_are_taken_and_found_soon(pattern):
    stop_patterns.check_patterns([pattern])
    begun = time.process_time()
    for letter in "a*1<\n ":  # each begins some pattern everywhere, and none ends
        assert pattern == "a{5000,}" or not re.search(pattern, letter * stop_patterns.LONGEST_TEXT)
    assert time.process_time() - begun < 10


def test_no_score_falls_when_more_is_asked():
    """Numbers beyond the longest text made some negative, and the pattern was taken."""
    for most in (1, 4095, 4096, 4097, 10**6, 2**32 - 2):
        for pattern in (f"a{{0,{most}}}", f"(?:a|b){{{most}}}", f"(?:a*){{{most},}}", f"(?=a){{{most}}}"):
            steps = stop_patterns.count_steps(pattern)
            assert 0 < steps <= stop_patterns.count_steps(pattern + "a") and steps >= min(most, 4096)


def test_a_rank_looks_through_the_end_of_a_response_only(monkeypatch):
    from sglang.srt.managers.schedule_batch import Req

    monkeypatch.setattr(Req, "tail_str", stop_patterns.tail_str)
    params = SimpleNamespace(stop_strs=[], stop_regex_strs=["x"], stop_str_max_len=0, stop_regex_max_len=2**30)
    decode = SimpleNamespace(decode=lambda ids: "x" + "y" * (len(ids) - 1))
    req = SimpleNamespace(sampling_params=params, output_ids=[0] * 9000, tokenizer=decode)
    req.tail_str = lambda *accepted: Req.tail_str(req, *accepted)
    if hasattr(Req, "_stop_match_tail_len"):
        req._stop_match_tail_len = lambda accepted: Req._stop_match_tail_len(req, accepted)
        req._locate_str_stop_finished_len = lambda accepted, **_: len(req.output_ids)
    assert not Req._check_str_based_finish(req), "the x lies too far back"
    req.output_ids = [0] * 4096
    assert Req._check_str_based_finish(req)
    params.stop_regex_strs, params.stop_strs, params.stop_str_max_len, req.output_ids = [], ["q"], 6000, [0] * 9000
    assert len(req.tail_str()) > stop_patterns.LONGEST_TEXT, "without patterns as SGLang has it"


# -- what policies are told ---------------------------------------------------------------------------------


def test_length_limits_have_32_bits():
    for value, told in ((10**30, 2**31 - 1), (5, 5), (None, 7)):
        assert get_length_limit(SimpleNamespace(custom_params={"pat_limit": value}, max_new_tokens=7)) == told


def test_a_request_that_names_its_round_is_reported_under_that_name():
    """SGLang does not get the name: it makes a cycle of references with ``custom_params``."""
    from sglang.srt.sampling.sampling_params import SamplingParams

    from sglang_pat.coordinator.process import classify
    from sglang_pat.rank import load_reports

    for custom, name, left in (
        ({"pat_round": "mine"}, "mine", None),
        ({"pat_round": "mine", "pat_generated": 1}, "mine", {"pat_generated": 1}),
        ({"pat_limit": 9}, "", {"pat_limit": 9}),
        (None, "", None),
    ):
        given = dict(rid="a", input_ids=[1, 2], sampling_params=SamplingParams(custom_params=custom))
        obj = make_message(adapter.controls.MarkableRequest, **given)
        (work,) = classify(obj)
        assert (work.round, obj.sampling_params.custom_params) == (name, left)
        setattr(work.obj, ROUND_MARK, name or "guessed")
        requests = [SimpleNamespace(pat_request=obj)] * 2 + [SimpleNamespace(pat_request=ask)]
        assert load_reports._list_rounds(requests) == [name or "guessed"]


def test_a_resumed_request_is_reported_as_its_response():
    """The family is that of the prompt alone, the length that of the whole response."""
    from sglang.srt.managers.schedule_batch import FINISH_LENGTH

    from sglang_pat.messages import Finished, Running
    from sglang_pat.rank import load_reports

    def request(prompt, output, **custom):
        params = SimpleNamespace(custom_params=custom, max_new_tokens=3)
        req = SimpleNamespace(
            sampling_params=params, origin_input_ids=prompt, pat_prompt=array("I", prompt), output_ids=output,
            finished_reason=FINISH_LENGTH(3),
        )  # fmt: skip
        load_reports.register(req)
        return req

    first, resumed = request([1, 2], [3]), request([1, 2, 3, 4], [5, 6, 7], pat_generated=2)
    assert count_prefix_tokens(resumed.sampling_params) == 2 and get_length_limit(resumed.sampling_params) == 5
    assert resumed.pat_family == first.pat_family and resumed.pat_limit == 5
    assert load_reports._describe_request(resumed) == Running(2, 5, 5, first.pat_family)
    reporter = load_reports.LoadReporter(None)
    reporter._account(resumed)
    assert reporter._finished == [Finished(5, first.pat_family, True, 2)]


@pytest.mark.skipif(adapter.FOLDER == "v0_5_12", reason="SGLang 0.5.12 has no such parameters")
def test_parameters_that_sglangs_routes_name_always():
    """Values that the routes set by default pass; those that a client has set are refused."""
    given = {"n": 1, "watermark": None, "beam_width": 1, "ebnf_full_assistant": True}
    assert validation.check_sampling_params(given) == {"n": 1, "ebnf_full_assistant": True}
    for name, value in (("watermark", {"key": 1}), ("beam_width", 4)):
        with pytest.raises(ValueError, match=f"unknown field `{name}`"):
            validation.check_sampling_params({name: value})
