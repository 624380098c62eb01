"""What samples say of their tokens, through verl's own agent loops and clients; engines and tokenizer are made up."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.tools.function_tool import FunctionTool
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.workers.rollout import llm_server
from verl.workers.rollout.replica import TokenOutput

from sglang_pat.integrations.verl import client, trainers
from sglang_pat.integrations.verl.fields import DEGREES, MOVES, STEPS, STOPS, expand_runs, was_stopped
from sglang_pat.messages import BeginRound, EndRound

pytestmark = pytest.mark.integration

CALL = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'


class Letters:
    """A tokenizer: a letter is a token, and each message is in brackets."""

    pad_token_id = 0

    def apply_chat_template(self, messages, add_generation_prompt=False, **_) -> list[int]:
        text = "".join(f"[{message['content']}]" for message in messages)
        return self.encode(text + ("[" if add_generation_prompt else ""))

    def encode(self, text: str, **_) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, tokens, **_) -> str:
        return "".join(map(chr, tokens))


def remote(function):
    """A method of a Ray actor."""

    async def called(*args, **kwargs):
        return function(*args, **kwargs)

    return SimpleNamespace(remote=called)


class Engine:
    """Answers one text after the other.  The degree is the number of the text, and 8 from its middle on."""

    def __init__(self, *parts: str) -> None:
        self.parts = list(parts)
        self.generate = remote(self._generate)
        self.asked = 0

    def _generate(self, prompt_ids, **_) -> TokenOutput:
        text = self.parts[self.asked]
        self.asked += 1
        degrees = ((0, self.asked), (len(text) // 2, 8)) if text else ()
        reason = "abort" if text.endswith("…") else "completed"
        fields = {DEGREES: degrees, STEPS: ((0, 10 + self.asked),), STOPS: [reason]}
        return TokenOutput(
            token_ids=Letters().encode(text.removesuffix("…")),
            stop_reason=reason,
            extra_fields={"global_steps": 10 + self.asked} | fields,
        )


def run(kind, client_class, engine: Engine):
    """verl's output of one agent loop of ``kind``."""
    balancer = SimpleNamespace(
        acquire_server=remote(lambda **_: ("engine", engine)),
        release_server=remote(lambda **_: None),
        require_acquire_fields=remote(list),
        require_release_fields=remote(list),
    )
    turns = {"max_user_turns": None, "max_assistant_turns": 5, "max_parallel_calls": 1, "format": "hermes"}
    turns |= {"max_tool_response_length": 256, "tool_response_truncate_side": "left"}
    rollout = {"prompt_length": 64, "response_length": 512, "full_determinism": False, "multi_turn": turns}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout | {"name": "sglang_pat"}}})

    schema = {"type": "function", "function": {"name": "clock", "description": "the time", "parameters": {}}}
    schema["function"]["parameters"] = {"type": "object", "properties": {}, "required": []}
    clock = FunctionTool("clock", lambda: "noon", OpenAIFunctionToolSchema.model_validate(schema))

    async def main():
        server = client_class(config=config, load_balancer_handle=balancer)
        loop = kind(
            trainer_config=DictConfigWrap(config), server_manager=server, tokenizer=Letters(), processor=None,
            dataset_cls=None, data_config=DictConfigWrap(OmegaConf.create({})), tools=ToolListWrap([clock]),
        )  # fmt: skip
        return await loop.run({}, raw_prompt=[{"role": "user", "content": "what time is it?"}])

    return asyncio.run(main())


CLIENTS = [client.AdaptiveClient, client.AdaptiveAsyncClient]


@pytest.mark.parametrize("client_class", CLIENTS)
def test_all_turns_of_a_response_say_who_generated_them(client_class):
    output = run(ToolAgentLoop, client_class, Engine(CALL, "wait"))
    said = output.as_dict()
    text = Letters().decode(said["responses"].tolist())
    mask = said["response_mask"].tolist()
    assert text.count(CALL) == 1 and "noon" in text[len(CALL) :], "a call, and an answer of the tool"
    degrees = expand_runs(said["extra_fields"][DEGREES], len(text))
    steps = expand_runs(said["extra_fields"][STEPS], len(text))
    assert [degree is not None for degree in degrees] == [bool(one) for one in mask]
    assert [step is not None for step in steps] == [bool(one) for one in mask]
    first, second = CALL, "wait"
    assert degrees[: len(first)] == [1] * (len(first) // 2) + [8] * (len(first) - len(first) // 2)
    assert degrees[-len(second) :] == [2, 2, 8, 8] and steps[-len(second) :] == [12] * 4
    assert type(said["extra_fields"][DEGREES]) is list, "as verl stores it"


def test_a_turn_in_parts():
    llm_server_sleep = llm_server.asyncio.sleep
    try:
        llm_server.asyncio.sleep = lambda seconds: llm_server_sleep(0)
        output = run(ToolAgentLoop, client.AdaptiveAsyncClient, Engine(CALL[:20] + "…", CALL[20:], "no…", "on"))
    finally:
        llm_server.asyncio.sleep = llm_server_sleep
    length = len(output.response_ids)
    steps = expand_runs(output.extra_fields[STEPS], length)
    assert steps[: len(CALL)] == [11] * 20 + [12] * (len(CALL) - 20)
    assert steps[-4:] == [13, 13, 14, 14]
    assert [step is not None for step in steps] == [bool(one) for one in output.response_mask]


@pytest.mark.parametrize("client_class", CLIENTS)
def test_a_single_turn(client_class):
    output = run(SingleTurnAgentLoop, client_class, Engine("it is noon"))
    assert output.extra_fields[DEGREES] == [(0, 1), (5, 8)] and output.extra_fields[STEPS] == [(0, 11)]


@pytest.mark.parametrize(
    ("kind", "parts", "stopped"),
    [
        (SingleTurnAgentLoop, ["it is noon"], False),
        (SingleTurnAgentLoop, ["it is…"], True),
        (SingleTurnAgentLoop, ["…"], True),
        (ToolAgentLoop, [CALL, "wait"], False),
        (ToolAgentLoop, [CALL, "wai…"], True),
        (ToolAgentLoop, [CALL + "…", "wait"], True),
    ],
)
def test_a_response_says_whether_any_of_its_turns_was_stopped(kind, parts, stopped):
    """Whoever rewards it sees these fields; verl's agents drop the reason."""
    assert was_stopped(run(kind, client.AdaptiveClient, Engine(*parts)).extra_fields) == stopped


def test_one_that_was_stopped_and_goes_on_was_not(monkeypatch):
    sleep = llm_server.asyncio.sleep
    monkeypatch.setattr(llm_server.asyncio, "sleep", lambda seconds: sleep(0))
    output = run(SingleTurnAgentLoop, client.AdaptiveAsyncClient, Engine("it is…", " noon"))
    assert not was_stopped(output.extra_fields)


def test_nothing_is_kept_of_a_response_that_is_over():
    gc.collect()  # responses of other tests
    output = run(ToolAgentLoop, client.AdaptiveClient, Engine(CALL, "wait"))
    assert len(client._sessions) == 3
    del output
    gc.collect()
    assert not client._sessions


def nested(*rows):
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def test_differences_by_degree_count_generated_tokens_of_all_turns():
    extra = [{DEGREES: [(0, 1), (2, None), (4, 2)]}, {DEGREES: [(0, 2)]}, {}]
    data = {
        "old_log_probs": nested([0.0] * 5, [0.0] * 2, [0.0]),
        "rollout_log_probs": nested([0.0, -1.0, -9.0, -9.0, -2.0], [0.0, -0.5], [-9.0]),
        "response_mask": nested([1, 1, 0, 0, 1], [1, 1], [1]),
        "extra_fields": SimpleNamespace(tolist=lambda: extra),
    }
    found = trainers._make_degree_metrics(data)
    assert found["rollout/tokens/tp1"] == 2 and found["rollout/tokens/tp2"] == 3
    assert found["training/rollout_probs_diff_max/tp1"] == pytest.approx(1 - torch.tensor(-1.0).exp().item())
    assert found["training/rollout_probs_diff_max/tp2"] == pytest.approx(1 - torch.tensor(-2.0).exp().item())
    assert len(found) == 6, "and of two degrees: tokens, largest difference, mean"


def test_without_log_probs_of_the_trainer_no_difference_is_told(monkeypatch):
    """verl's bypass mode: it takes the engine's."""
    stored = {
        "rollout_log_probs": nested([-0.5] * 3, [-1.0] * 2),
        "response_mask": nested([1] * 3, [1] * 2),
        "extra_fields": SimpleNamespace(tolist=lambda: [{DEGREES: [(0, 1), (2, 8)]}, {DEGREES: [(0, 1)]}]),
    }
    monkeypatch.setattr(trainers.tq, "kv_batch_get", lambda select_fields, **_: {n: stored[n] for n in select_fields})
    monkeypatch.setattr(trainers.tq, "kv_batch_put", lambda fields, **_: stored.update(fields))
    trainer = object.__new__(trainers.AdaptiveSync)
    trainer.config = OmegaConf.create(
        {
            "algorithm": {"rollout_correction": {"bypass_mode": True}},
            "actor_rollout_ref": {"rollout": {"calculate_log_probs": True}},
        }
    )
    metrics = {}
    trainer._compute_old_log_prob(SimpleNamespace(keys=["a", "b"], partition_id="train"), metrics)
    assert stored["old_log_probs"] is stored["rollout_log_probs"]
    assert metrics == {"rollout/tokens/tp1": 4, "rollout/tokens/tp8": 1}


def test_counts_are_those_of_all_parts_of_a_step():
    trainer = object.__new__(trainers.AdaptiveSeparateAsync)
    trainer.config = OmegaConf.create({"data": {"train_batch_size": 4}})
    trainer.parameter_sync_step, trainer.prepare_step = 2, dict
    counts = iter([("a", 10, 1), ("b", 30, 2)])

    def train_part(metrics, timing_raw, samples):
        key, metrics["rollout/tokens/tp2"], metrics["reward/failed_masked"] = next(counts)
        return SimpleNamespace(keys=[key], tags=[{}], partition_id="train")

    trainer._step_once = train_part
    metrics = {}
    trainer.step(metrics, {})
    assert metrics == {"rollout/tokens/tp2": 40, "reward/failed_masked": 3}


def test_what_engines_do_for_a_validation_is_no_steps():
    calls = []
    trainer = object.__new__(trainers.AdaptiveSync)
    trainer.engines = SimpleNamespace(announce=calls.append, take_metrics=lambda: calls.append("taken"))
    trainer.on_validate_begin()
    trainer.on_validate_end()
    assert calls == [BeginRound(kind="validation"), EndRound(), "taken"]


def test_responses_whose_engines_died_are_counted_over_all_parts_of_a_step(monkeypatch):
    """Nobody has asked for log-probs of the engine."""
    moves = iter([[{MOVES: [0, 4]}, {}], [{MOVES: [3]}], [{}]])
    monkeypatch.setattr(
        trainers.tq, "kv_batch_get", lambda **_: {"extra_fields": SimpleNamespace(tolist=lambda: next(moves))}
    )
    trainer = object.__new__(trainers.TRAINER_REGISTRY["sync"])
    trainer.note_moves(SimpleNamespace(keys=["a"], partition_id="train"))
    assert not trainer._consume_sync_metrics(), "the engines are verl's own"
    trainer.fleets = [SimpleNamespace(take_metrics=lambda: {"rollout/engines": 1.0})]
    for parts, moved, tokens in ((2, 2, 7), (1, 0, 0)):
        for _ in range(parts):
            trainer.note_moves(SimpleNamespace(keys=["a"], partition_id="train"))
        metrics = trainer._consume_sync_metrics()
        assert (metrics["rollout/moved_requests"], metrics["rollout/tokens_of_dead_engines"]) == (moved, tokens)
