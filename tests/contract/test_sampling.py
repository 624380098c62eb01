"""Which sampling parameters are taken, and as what; values that ended the engine, one by one."""

from __future__ import annotations

import inspect
import math
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.contract


def test_parameters_are_sglangs(package):
    """A new one would be refused."""
    from sglang.srt.sampling.sampling_params import SamplingParams

    theirs = inspect.signature(SamplingParams).parameters
    ours = package.sampling.Sampling()
    assert set(package.sampling.Sampling.__struct_fields__) == set(theirs)
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
def test_taken(package, given, taken):
    assert package.sampling.checked(given) == taken


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
    ({"stop": ["a" * 1500, "b" * 1500]}, "stop: 3000 characters"),
    ({"stop_regex": ["." + r"*.{0,2}\x00"] * 1024}, "stop_regex"),
    ({"stop_regex": ["a" * 2**18] * 8}, "stop_regex: 2097152 characters"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids"),
    ({"stop_token_ids": 5}, "stop_token_ids"),
    ({"json_schema": {"type": "object"}}, "json_schema"),
    ({"ebnf": "(" * 10_000}, "ebnf: brackets 10000 deep"),
    ({"regex": "a" * 2**21}, "regex: 2097152 characters"),
    ({"custom_params": {"pat_limit": True}}, "pat_limit is True"),
    ({"custom_params": {"pat_limit": 16.0}}, "pat_limit is 16.0"),
    ({"custom_params": {"pat_limit": 0}}, "pat_limit is 0"),
    ({"custom_params": {"pat_generated": -1}}, "pat_generated is -1"),
    ({"custom_params": [1]}, "custom_params"),
    ({"unknown": 1}, "unknown"),
    ({5: 1}, "key"),
    ([], "must be an object"),
    ("abc", "must be an object"),
]


@pytest.mark.parametrize("given, what", REFUSED, ids=lambda v: str(v)[:30])
def test_refused_in_one_line(package, given, what):
    with pytest.raises(ValueError) as caught:
        package.sampling.checked(given)
    message = str(caught.value)
    assert "sampling_params" in message and what in message and "\n" not in message and len(message) < 300


def test_deep_parameters_are_refused(package):
    """Pickle walks them on every rank, with less of the stack left than here."""
    deep: dict = {}
    for _ in range(package.sampling.MAX_DEPTH):
        deep = {"a": [deep]}
    with pytest.raises(ValueError, match="nested"):
        package.sampling.checked({"custom_params": deep})
    assert package.sampling.checked({"custom_params": {"a": [1, {"b": 2}]}})


@pytest.mark.parametrize(
    "pattern",
    [
        r"(a+)+$", r"(a|a)*b", ".*x.*y", "a?" * 30 + "a" * 30, "(a|aa){30}b", r"(a)\1", "(", r"(\w+ )*x",
        r"(.+)+\x00(?!a{5000,})", r".*.{0,2}\x00",
    ],
)  # fmt: skip
def test_patterns_that_take_for_ever(package, pattern):
    with pytest.raises(ValueError, match="stop_regex"):
        package.sampling.checked({"stop_regex": pattern})


def test_patterns_of_many_samples_are_bounded_together(package):
    """They are parsed in the server's event loop."""
    same = [{"stop_regex": "a" * 1000}] * 1000
    assert package.sampling.checked_all(same) == same
    other = [{"stop_regex": [f"{i:04}" * 250]} for i in range(16)]
    assert package.sampling.checked_all(other) == other
    with pytest.raises(ValueError, match="more than 16384 characters for all samples together"):
        package.sampling.checked_all(other + same)
    with pytest.raises(ValueError, match="must be an object"):
        package.sampling.checked_all([{}, 5])


@pytest.mark.parametrize("value", [True, 16.0, 10**30, 2**63, "x", [1], -5, None])
def test_length_limits_are_small_whole_numbers_whatever_was_given(package, value):
    params = SimpleNamespace(custom_params={"pat_limit": value}, max_new_tokens=7)
    limit = package.sampling.length_limit(params)
    assert type(limit) is int and 0 <= limit < 2**31
    assert limit == {10**30: 2**31 - 1, 2**63: 2**31 - 1, -5: 0}.get(value if isinstance(value, int) else None, 7)


def test_what_came_with_the_prompt_counts_to_the_limit(package):
    params = SimpleNamespace(custom_params={"pat_generated": 30}, max_new_tokens=20)
    assert package.sampling.generated_before(params) == 30 and package.sampling.length_limit(params) == 50
    params.custom_params["pat_limit"] = 40
    assert package.sampling.length_limit(params) == 40


def test_a_resumed_request_is_reported_as_its_response():
    """In mode partial: the family is that of the prompt alone, the length that of the whole response."""
    from array import array

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
    assert resumed.pat_family == first.pat_family and resumed.pat_limit == 5
    assert load_reports._running(resumed) == Running(2, 5, 5, first.pat_family)
    reporter = load_reports.LoadReporter(None)
    reporter._account(resumed)
    assert reporter._finished == [Finished(5, first.pat_family, True, 2)]
