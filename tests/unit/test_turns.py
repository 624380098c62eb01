"""Samples of several turns, on an engine and an environment that are played: what is generated and what is given,
limits, errors; samples that are stopped, and go on."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from sglang_pat.rollout.admitter import Admitter
from sglang_pat.rollout.records import Group, Output, Span
from sglang_pat.rollout.rounds import RolloutRound, WeightsChanged
from sglang_pat.rollout.turns import FAILED, LATE, EnvironmentCalls, Turn, make_turn

from . import rounds_world
from .admission_world import dumps, loads
from .rounds_world import SAID, Played, list_events

pytestmark = pytest.mark.unit

END, TOOL = 9, 5
"""Tokens: the last of the model's turn; of the environment."""


class Speaking(Played):
    """The first token of a prompt says how many tokens each of the model's turns has."""

    def left(self, ids: list[Any]) -> int:
        lengths, after = ids[0], ids[1:]
        begun = max((i + 1 for i, token in enumerate(after) if token in (END, TOOL)), default=0)
        return lengths[after.count(END)] - (len(after) - begun)

    def output(self, tokens: int, reason: str) -> Output:
        output = super().output(tokens, reason)
        if reason == "stop":
            output.token_ids[-1] = END
        return output


class Tools:
    """An environment: ``calls`` of them answer with three tokens, the next says that it is over.

    Attributes:
        open: an answer comes while it is set.
        asked: set while a call waits.
    """

    def __init__(self, calls: int = 1) -> None:
        self.calls = calls
        self.turns: list[Turn] = []
        self.open = asyncio.Event()
        self.open.set()
        self.asked = asyncio.Event()
        self.cancelled = 0

    async def __call__(self, turn: Turn) -> list[int] | None:
        self.turns.append(turn)
        self.asked.set()
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return [TOOL] * 3 if turn.number < self.calls else None


def admitter(*lengths: list[int], **rules: Any) -> Admitter:
    given = {"num_prompts": len(lengths), "num_responses": 1, "eta_prompts": 1.0} | rules
    return rounds_world.admitter(*lengths, **given)


def begun(mine: Admitter, engine: Played, environment, version: int = 0, seconds: float = 60, **params) -> RolloutRound:
    turns = EnvironmentCalls(environment, seconds) if environment is not None else None
    return RolloutRound(mine, engine, version, {"max_new_tokens": 100} | params, turns=turns)


def only(events: list) -> Output:
    (group,) = [event for event in events if isinstance(event, Group)]
    return group.list_kept()[0].output


async def test_a_sample_of_several_turns():
    engine, tools, mine = Speaking(), Tools(calls=2), admitter([3, 2, 4])
    *groups, summary = await list_events(begun(mine, engine, tools, version=8))
    output = only(groups)
    assert output.token_ids == [7, 7, 9, 5, 5, 5, 7, 9, 5, 5, 5, 7, 7, 7, 9]
    assert output.make_mask() == [token != TOOL for token in output.token_ids]
    assert output.logprobs == [-1.0 if mine else 0.0 for mine in output.make_mask()]
    assert output.list_versions() == [8 if mine else None for mine in output.make_mask()]
    assert output.spans == [Span(8, 3), Span(None, 3), Span(8, 2), Span(None, 3), Span(8, 4)]
    assert output.finish_reason == "stop" and output.text == "7 7 9 5 5 5 7 9 5 5 5 7 7 7 9"
    assert summary.kept_lengths == [9], "given tokens are no part of the length"
    # The prefix is kept: each request continues the one before.
    assert [len(ids) - 1 for ids, _ in engine.calls] == [0, 6, 11]
    assert [params["max_new_tokens"] for _, params in engine.calls] == [100, 97, 95]
    assert [(turn.number, turn.said, turn.text) for turn in tools.turns] == [
        (0, [7, 7, 9], "7 7 9"),
        (1, [7, 9], "7 9"),
        (2, [7, 7, 7, 9], "7 7 7 9"),
    ]
    assert [len(turn.token_ids) for turn in tools.turns] == [3, 8, 15]
    assert all(turn.sample == (0, 0, 0, 1) and turn.prompt == {"input_ids": [[3, 2, 4]]} for turn in tools.turns)


async def test_without_an_environment_a_turn_is_the_response():
    output = only(await list_events(begun(admitter([3, 2]), Speaking(), None)))
    assert output.token_ids == [7, 7, 9] and output.make_mask() == [True] * 3 and output.finish_reason == "stop"


@pytest.mark.parametrize(
    ("limit", "room", "tokens", "reason"),
    [
        (9, 1000, 15, "stop"),
        (8, 1000, 14, "length"),
        (6, 1000, 12, "length"),
        (5, 1000, 8, "length"),  # nothing is left for a third turn, so its tool's answer is left out
        (4, 1000, 7, "length"),
        (2, 1000, 2, "length"),
        (100, 15, 14, "length"),  # of 15 tokens the prompt has one
        (100, 13, 12, "length"),
        (100, 12, 8, "length"),
        (100, 7, 3, "length"),
    ],
)
async def test_limits_count_generated_tokens_over_all_turns(limit, room, tokens, reason):
    engine = Speaking(room)
    output = only(await list_events(begun(admitter([3, 2, 4]), engine, Tools(calls=2), max_new_tokens=limit)))
    assert (len(output.token_ids), output.finish_reason) == (tokens, reason)
    assert output.tokens <= limit
    assert all(len(ids) + params["max_new_tokens"] <= room for ids, params in engine.calls[1:])


async def test_unbiased_is_refused():
    engine, mine = Speaking(), admitter([3, 2], unbiased=True)
    with pytest.raises(ValueError, match="^unbiased is true, must be false with turns"):
        begun(mine, engine, Tools())
    assert not engine.calls and mine.state.round is None


async def test_the_longest_sample_is_the_one_that_has_said_most():
    """Five turns of one token against one turn of ten: the round keeps those that end first, whole samples."""

    mine = admitter([1] * 6, [1] * 6, [400], [400], num_prompts=2, eta_prompts=2.0)
    engine, tools = Speaking(), Tools(calls=5)

    async def environment(turn: Turn) -> list[int] | None:
        return await tools(turn) if turn.sample.index < 2 else None

    *groups, summary = await list_events(begun(mine, engine, environment, max_new_tokens=500))
    assert sorted(group.index for group in groups) == [0, 1]
    assert summary.kept_lengths == [6, 6]
    assert len(summary.aborted_lengths) == 2 and 6 < max(summary.aborted_lengths) < 400


def test_ages_and_lengths_leave_given_tokens_out():
    output = Output(spans=[Span(None, 5), Span(3, 2), Span(4, 1)])
    assert output.tokens == 3 and output.oldest == 3
    assert Output(spans=[Span(None, 5)]).oldest is None


async def test_an_error_of_the_environment_ends_its_sample(caplog):
    async def environment(turn: Turn) -> None:
        if turn.sample.index == 0:
            raise LookupError("no such tool")

    *groups, summary = await list_events(begun(admitter([3], [4]), Speaking(), environment))
    reasons = {group.index: group.list_kept()[0].output.finish_reason for group in groups}
    assert reasons == {0: FAILED, 1: "stop"} and summary.returned == 2
    assert "no such tool" in caplog.text


async def test_an_environment_that_hangs_ends_its_sample():
    cancelled = asyncio.Event()

    async def environment(turn: Turn) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    output = only(await list_events(begun(admitter([3]), Speaking(), environment, seconds=0.01)))
    assert output.finish_reason == LATE and output.token_ids == [7, 7, 9]
    await cancelled.wait()


@pytest.mark.parametrize("answer", ["text", [], [1, "2"], 3])
async def test_what_is_no_answer_ends_the_round(answer):
    async def environment(turn: Turn):
        return answer

    mine = admitter([3], [4])
    with pytest.raises((TypeError, ValueError), match="the environment answered .* must be token ids"):
        await list_events(begun(mine, Speaking(), environment))
    assert len(mine.state.fresh) == 2


async def test_an_environment_is_a_coroutine_function():
    with pytest.raises(TypeError, match=r"must be a coroutine function \(async def\)"):
        await list_events(begun(admitter([3]), Speaking(), lambda turn: [TOOL]))
    with pytest.raises(ValueError, match="environment_seconds is 0, must be more than 0 and at most 86400"):
        EnvironmentCalls(lambda turn: None, 0)


# -- stopped, and gone on with ---------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["turn", "tool", "second turn"])
async def test_a_sample_is_stopped_in_each_phase(phase):
    lengths = {"turn": [1000000], "tool": [3, 3], "second turn": [3, 1000000]}[phase]
    engine, tools, mine = Speaking(10_000_000), Tools(), admitter(lengths)
    if phase == "tool":
        tools.open.clear()
    round_ = begun(mine, engine, tools, max_new_tokens=2_000_000)
    while not {"turn": engine.running, "tool": tools.turns, "second turn": len(engine.calls) == 2}[phase]:
        await asyncio.sleep(0)
    round_.cancel()
    await round_.wait()
    await asyncio.sleep(0)
    assert not engine.running and tools.cancelled == (phase == "tool")
    assert mine.state.round is None and len(mine.state.fresh) == 1 and mine.state.fresh[0].tokens == 0


async def test_a_tool_that_does_not_listen_does_not_keep_the_round():
    asked, over = asyncio.Event(), asyncio.Event()

    async def deaf(turn: Turn) -> None:
        asked.set()
        while not over.is_set():
            try:
                await over.wait()
            except asyncio.CancelledError:
                continue

    mine, engine = admitter([3]), Speaking()
    round_ = begun(mine, engine, deaf)
    await asked.wait()
    round_.cancel()
    await round_.wait()
    assert len(mine.state.fresh) == 1
    over.set()


async def test_a_sample_is_stopped_when_the_batch_is_full_while_its_tool_works():
    mine, engine, tools = admitter([3], [5], num_prompts=1, eta_prompts=2.0), Speaking(), Tools(calls=0)

    async def environment(turn: Turn) -> None:
        if turn.sample.index == 0:
            await asyncio.Event().wait()

    *groups, summary = await list_events(begun(mine, engine, environment))
    assert [group.index for group in groups] == [1]
    assert summary.aborted_lengths == [3] and summary.thrown == 3
    assert not tools.turns


async def test_partial_goes_on_in_the_turn_in_which_it_was_interrupted():
    """A round each interrupts it in its first turn, in a tool call, there again, in its second turn, by a sample that
    ends then; the state is saved between."""

    engine, tools, found, states = Speaking(), Tools(), [], []
    others = [[2], [60], [2], [30]]
    mine = admitter([20, 50], *others, mode="partial", num_prompts=1, eta_prompts=2.0, max_staleness=9)

    async def environment(turn: Turn) -> list[int] | None:
        return await tools(turn) if turn.sample.index == 0 else None

    for version in range(5):
        tools.open.clear() if version < 3 else tools.open.set()
        found += await list_events(begun(mine, engine, environment, version=version))
        states += [(g.samples[0].output.tokens, g.samples[0].output.asked) for g in mine.state.waiting]
        mine = loads(dumps(mine))
    assert [asked for _, asked in states] == [False, True, True, False]
    assert 0 < states[0][0] < 20 == states[1][0] == states[2][0] < states[3][0] < 70
    assert tools.cancelled == 2, "its answer was waited for when the round was over"
    groups = [event for event in found if isinstance(event, Group)]
    assert [group.index for group in groups] == [1, 2, 3, 4, 0]
    output = groups[-1].list_kept()[0].output
    assert output.token_ids == [SAID] * 19 + [END] + [TOOL] * 3 + [SAID] * 49 + [END]
    assert output.list_versions()[20:23] == [None] * 3 and output.make_mask().count(False) == 3
    versions = [version for version in output.list_versions() if version is not None]
    assert versions == sorted(versions) and set(versions) == {0, 1, 3, 4}
    # Asked for the first turn again after each interruption, with the whole turn though it came in pieces.
    assert [(turn.number, len(turn.said)) for turn in tools.turns] == [(0, 20)] * 3 + [(1, 50)]
    assert not mine.state.waiting and not mine.state.fresh


@pytest.mark.parametrize("mode", ["strict", "reorder", "partial"])
@pytest.mark.parametrize("seed", range(12))
async def test_whatever_interrupts_them_samples_are_as_if_nothing_had(mode, seed):
    """Random turns, slow and fast tools, rounds that are cancelled at any moment: each response is what it would be in
    one piece, its generated tokens have versions in order, and no prompt is lost or comes twice."""

    chance = random.Random(seed)
    scripts = [[chance.randint(1, 12) for _ in range(chance.randint(1, 4))] for _ in range(12)]
    rules = {"num_prompts": 3, "num_responses": 2, "eta_prompts": 1.5, "max_staleness": 99, "max_deferrals": 3}
    mine, engine, returned = admitter(*scripts, mode=mode, **rules), Speaking(), {}

    async def environment(turn: Turn) -> list[int] | None:
        for _ in range(chance.randint(0, 9)):
            await asyncio.sleep(0)
        return [TOOL] * (1 + turn.number) if turn.number + 1 < len(scripts[turn.sample.index]) else None

    for version in range(200):
        if not (mine.state.fresh or mine.state.waiting):
            break
        round_ = begun(mine, engine, environment, version=version)
        if cancelled := chance.random() < 0.4:
            for _ in range(chance.randint(0, 40)):
                await asyncio.sleep(0)
            round_.cancel()
        events = await list_events(round_)
        assert not engine.running
        if not (cancelled and events[-1].cancelled):
            for group in events[:-1]:
                assert returned.setdefault(group.index, group) is group
        mine = loads(dumps(mine))
    assert sorted(returned) == list(range(12))
    for index, group in returned.items():
        wanted = []
        for number, length in enumerate(scripts[index]):
            wanted += [TOOL] * number + [SAID] * (length - 1) + [END]
        for sample in group.list_kept():
            output = sample.output
            assert output.token_ids == wanted and output.finish_reason == "stop"
            assert output.make_mask() == [token != TOOL for token in wanted]
            assert output.tokens == sum(scripts[index])
            versions = [version for version in output.list_versions() if version is not None]
            assert versions == sorted(versions) and (mode == "partial" or len(set(versions)) == 1)


def test_a_turn_that_was_over_is_not_generated_again():
    """An interrupted sample whose tool had not answered is not in the engine when it goes on; nor if it is again
    stopped before it has begun."""
    prefix = Output(spans=[Span(0, 2)], token_ids=[7, 9], logprobs=[0.0] * 2, asked=True)
    assert prefix.concatenate(Output()).asked
    assert not prefix.concatenate(Output(spans=[Span(None, 1)], token_ids=[TOOL])).asked
    assert not prefix.concatenate(Output(finish_reason="stop")).asked
    assert Output(token_ids=[7], spans=[Span(0, 1)]).concatenate(Output(asked=True)).asked


def test_routed_experts_of_a_response_in_pieces():
    """Each piece has those of all tokens before it, computed anew; of a request that waited there are none."""
    pieces = [Output(routed_experts=rows) for rows in (b"aabb", b"", b"", b"xxyycc", b"xx", b"xxyyzzdd")]
    whole = Output()
    for piece in pieces:
        whole = whole.concatenate(piece)
    assert whole.routed_experts == b"aabbccdd"


def test_what_was_said_in_pieces_is_one_turn():
    output = Output(spans=[Span(0, 1), Span(None, 2), Span(1, 1), Span(2, 2)], token_ids=[9, 5, 5, 7, 7, 9])
    turn = make_turn((0, 0, 0, 3), {}, output, str)
    assert (turn.number, turn.said, turn.text) == (1, [7, 7, 9], "[7, 7, 9]")


@pytest.mark.parametrize("mode", ["strict", "partial"])
async def test_weights_that_change_while_a_tool_works_cancel_the_round(mode):
    engine, tools = Speaking(), Tools()
    tools.open.clear()
    mine = admitter([3, 4], mode=mode)
    round_ = begun(mine, engine, tools, version=6)
    await tools.asked.wait()
    engine.weights += 1
    tools.open.set()
    with pytest.raises(WeightsChanged):
        await list_events(round_)
    await round_.wait()
    assert len(mine.state.fresh) == 1 and not engine.running
