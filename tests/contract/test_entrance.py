"""What a whole request must be before any rank sees it; values that ended the engine, one by one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from fastapi import Request

from .requests_made import asked, tokenized

pytestmark = pytest.mark.contract

VOCAB = 512


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
        ({"positional_embed_overrides": [1]}, "positional_embed_overrides"),
        ({"sampling_params": {"n": 10**9}}, "1000000000 samples"),
        ({"sampling_params": []}, "empty list"),
        ({"sampling_params": [{}, 5]}, "must be an object"),
        ({"input_ids": []}, "no prompt"),
        ({"input_ids": None, "input_embeds": [[1.0]]}, "input_embeds: not with"),
        ({"input_ids": None, "text": ["a"] * 70_000}, "70000 samples"),
        ({"input_ids": None, "text": "a\ud800"}, "text: character 1 is half of a surrogate pair"),
        ({"input_ids": None, "text": ["a", "\ud800"]}, r"text\[1\]: character 0 is half of a surrogate pair"),
        ({"input_ids": None, "text": ["a", 5]}, r"text\[1\] is '5', must be a string"),
    ],
    ids=str,
)
def test_requests_over_http_are_refused(package, fields, what):
    with pytest.raises(ValueError, match=what) as caught:
        package.entrance.admit(asked(**fields), "/generate")
    assert "\n" not in str(caught.value)


def test_outputs_go_nowhere_else(package):
    request = asked(http_worker_ipc="ipc:///tmp/mine")
    package.entrance.admit(request, "/generate")
    assert request.http_worker_ipc is None


def test_the_engines_own_requests_pass(package):
    package.entrance.admit(asked(rid="pat-0-1"), None)
    package.entrance.admit(asked(rid="HEALTH_CHECK_1"), "/health_generate")
    package.entrance.admit(
        asked(rid="mine", sampling_params=[{"n": None}, {"n": 1}], input_ids=[[1], [2]]), "/generate"
    )


@pytest.fixture(scope="module")
def checker(package):
    model = SimpleNamespace(vocab_size=VOCAB)
    return package.entrance.Entrance(SimpleNamespace(model_config=model, tokenizer=SimpleNamespace(eos_token_id=2)))


@pytest.mark.parametrize("known, left", [(None, None), (["team"], {"team": "a"})])
def test_labels_that_no_metric_has_are_left_out(package, known, left):
    arguments = SimpleNamespace(tokenizer_metrics_allowed_custom_labels=known)
    request = asked(custom_labels={"team": "a", "other": "b"})
    package.entrance.Entrance(SimpleNamespace(server_args=arguments)).admit(request, "/generate")
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
    checker.check(tokenized(logprob_start_len=2**40))


def test_stop_tokens_that_never_come_are_left_out(checker):
    """SGLang uses them as indices as soon as any request of the batch has ``min_new_tokens``."""
    request = tokenized({"stop_token_ids": [5, 10**7, -1]})
    checker.check(request)
    assert request.sampling_params.stop_token_ids == {5}


@pytest.mark.parametrize("params", [{"stop": "a"}, {"stop_regex": "a"}, {"min_new_tokens": 1}])
def test_what_needs_a_tokenizer(package, params):
    model = SimpleNamespace(vocab_size=VOCAB)
    entrance = package.entrance.Entrance(SimpleNamespace(model_config=model, tokenizer=None))
    with pytest.raises(ValueError, match="tokenizer"):
        entrance.check(tokenized(params))


@pytest.mark.parametrize("root", ["", "/api"])
def test_health_checks_come_in_below_a_root_path(package, root):
    """With ``--fastapi-root-path`` as well: a server whose health checks are turned away never becomes healthy."""
    request = Request({"type": "http", "path": f"{root}/health", "root_path": root, "headers": []})
    assert package.entrance.route(request) == "/health"
    package.entrance.admit(asked(rid="HEALTH_CHECK_1"), package.entrance.route(request))
