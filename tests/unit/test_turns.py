"""Samples of several turns: what is generated and what is given, limits, errors."""

from __future__ import annotations

import asyncio

import pytest

from sglang_pat.rollout.records import Output, Span
from sglang_pat.rollout.turns import FAILED, LATE, Turn, Turns

from .turns_world import TOOL, Played, Tools, admitter, all_of, begun, only, run

pytestmark = pytest.mark.unit


def test_a_sample_of_several_turns():
    async def test() -> None:
        engine, tools, mine = Played(), Tools(calls=2), admitter([3, 2, 4])
        *groups, summary = await all_of(begun(mine, engine, tools, version=8))
        output = only(groups)
        assert output.token_ids == [7, 7, 9, 5, 5, 5, 7, 9, 5, 5, 5, 7, 7, 7, 9]
        assert output.mask() == [token != TOOL for token in output.token_ids]
        assert output.logprobs == [-1.0 if mine else 0.0 for mine in output.mask()]
        assert output.versions() == [8 if mine else None for mine in output.mask()]
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

    run(test)


def test_without_an_environment_a_turn_is_the_response():
    async def test() -> None:
        output = only(await all_of(begun(admitter([3, 2]), Played(), None)))
        assert output.token_ids == [7, 7, 9] and output.mask() == [True] * 3 and output.finish_reason == "stop"

    run(test)


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
def test_limits_count_generated_tokens_over_all_turns(limit, room, tokens, reason):
    async def test() -> None:
        engine = Played(room)
        output = only(await all_of(begun(admitter([3, 2, 4]), engine, Tools(calls=2), max_new_tokens=limit)))
        assert (len(output.token_ids), output.finish_reason) == (tokens, reason)
        assert output.tokens <= limit
        assert all(len(ids) + params["max_new_tokens"] <= room for ids, params in engine.calls[1:])

    run(test)


def test_unbiased_is_refused():
    async def test() -> None:
        engine, mine = Played(), admitter([3, 2], unbiased=True)
        with pytest.raises(ValueError, match="^unbiased is true, must be false with turns"):
            begun(mine, engine, Tools())
        assert not engine.calls and mine.state.round is None

    run(test)


def test_the_longest_sample_is_the_one_that_has_said_most():
    """Five turns of one token against one turn of ten: the round keeps those that end first, whole samples."""

    async def test() -> None:
        mine = admitter([1] * 6, [1] * 6, [400], [400], num_prompts=2, eta_prompts=2.0)
        engine, tools = Played(), Tools(calls=5)

        async def environment(turn: Turn) -> list[int] | None:
            return await tools(turn) if turn.sample.index < 2 else None

        *groups, summary = await all_of(begun(mine, engine, environment, max_new_tokens=500))
        assert sorted(group.index for group in groups) == [0, 1]
        assert summary.kept_lengths == [6, 6]
        assert len(summary.aborted_lengths) == 2 and 6 < max(summary.aborted_lengths) < 400

    run(test)


def test_ages_and_lengths_leave_given_tokens_out():
    output = Output(spans=[Span(None, 5), Span(3, 2), Span(4, 1)])
    assert output.tokens == 3 and output.oldest == 3
    assert Output(spans=[Span(None, 5)]).oldest is None


def test_an_error_of_the_environment_ends_its_sample(caplog):
    async def test() -> None:
        async def environment(turn: Turn) -> None:
            if turn.sample.index == 0:
                raise LookupError("no such tool")

        *groups, summary = await all_of(begun(admitter([3], [4]), Played(), environment))
        reasons = {group.index: group.kept()[0].output.finish_reason for group in groups}
        assert reasons == {0: FAILED, 1: "stop"} and summary.returned == 2
        assert "no such tool" in caplog.text

    run(test)


def test_an_environment_that_hangs_ends_its_sample():
    async def test() -> None:
        cancelled = asyncio.Event()

        async def environment(turn: Turn) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        output = only(await all_of(begun(admitter([3]), Played(), environment, seconds=0.01)))
        assert output.finish_reason == LATE and output.token_ids == [7, 7, 9]
        await cancelled.wait()

    run(test)


@pytest.mark.parametrize("answer", ["text", [], [1, "2"], 3])
def test_what_is_no_answer_ends_the_round(answer):
    async def test() -> None:
        async def environment(turn: Turn):
            return answer

        mine = admitter([3], [4])
        with pytest.raises((TypeError, ValueError), match="the environment answered .* must be token ids"):
            await all_of(begun(mine, Played(), environment))
        assert len(mine.state.fresh) == 2

    run(test)


def test_an_environment_is_a_coroutine_function():
    async def test() -> None:
        with pytest.raises(TypeError, match=r"must be a coroutine function \(async def\)"):
            await all_of(begun(admitter([3]), Played(), lambda turn: [TOOL]))

    run(test)
    with pytest.raises(ValueError, match="environment_seconds is 0, must be more than 0 and at most 86400"):
        Turns(lambda turn: None, 0)
