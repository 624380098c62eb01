"""Samples of several turns that are stopped, and go on."""

from __future__ import annotations

import asyncio
import random

import pytest

from sglang_pat.rollout.records import Group, Output, Span
from sglang_pat.rollout.rounds import WeightsChanged
from sglang_pat.rollout.turns import Turn, turn_of

from .admission_world import dumps, loads
from .turns_world import END, SAID, TOOL, Played, Tools, admitter, all_of, begun, run

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("phase", ["turn", "tool", "second turn"])
def test_a_sample_is_stopped_in_each_phase(phase):
    async def test() -> None:
        lengths = {"turn": [1000000], "tool": [3, 3], "second turn": [3, 1000000]}[phase]
        engine, tools, mine = Played(10_000_000), Tools(), admitter(lengths)
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

    run(test)


def test_a_tool_that_does_not_listen_does_not_keep_the_round():
    async def test() -> None:
        asked, over = asyncio.Event(), asyncio.Event()

        async def deaf(turn: Turn) -> None:
            asked.set()
            while not over.is_set():
                try:
                    await over.wait()
                except asyncio.CancelledError:
                    continue

        mine, engine = admitter([3]), Played()
        round_ = begun(mine, engine, deaf)
        await asked.wait()
        round_.cancel()
        await round_.wait()
        assert len(mine.state.fresh) == 1
        over.set()

    run(test)


def test_a_sample_is_stopped_when_the_batch_is_full_while_its_tool_works():
    async def test() -> None:
        mine, engine, tools = admitter([3], [5], num_prompts=1, eta_prompts=2.0), Played(), Tools(calls=0)

        async def environment(turn: Turn) -> None:
            if turn.sample.index == 0:
                await asyncio.Event().wait()

        *groups, summary = await all_of(begun(mine, engine, environment))
        assert [group.index for group in groups] == [1]
        assert summary.aborted_lengths == [3] and summary.thrown == 3
        assert not tools.turns

    run(test)


def test_partial_goes_on_in_the_turn_in_which_it_was_interrupted():
    """In its first turn, in a tool call, there again, in its second turn: in a round each, by a sample that ends then;
    with the state saved between."""

    async def test() -> None:
        engine, tools, found, states = Played(), Tools(), [], []
        others = [[2], [60], [2], [30]]
        mine = admitter([20, 50], *others, mode="partial", num_prompts=1, eta_prompts=2.0, max_staleness=9)

        async def environment(turn: Turn) -> list[int] | None:
            return await tools(turn) if turn.sample.index == 0 else None

        for version in range(5):
            tools.open.clear() if version < 3 else tools.open.set()
            found += await all_of(begun(mine, engine, environment, version=version))
            states += [(g.samples[0].output.tokens, g.samples[0].output.asked) for g in mine.state.waiting]
            mine = loads(dumps(mine))
        assert [asked for _, asked in states] == [False, True, True, False]
        assert 0 < states[0][0] < 20 == states[1][0] == states[2][0] < states[3][0] < 70
        assert tools.cancelled == 2, "its answer was waited for when the round was over"
        groups = [event for event in found if isinstance(event, Group)]
        assert [group.index for group in groups] == [1, 2, 3, 4, 0]
        output = groups[-1].kept()[0].output
        assert output.token_ids == [SAID] * 19 + [END] + [TOOL] * 3 + [SAID] * 49 + [END]
        assert output.versions()[20:23] == [None] * 3 and output.mask().count(False) == 3
        versions = [version for version in output.versions() if version is not None]
        assert versions == sorted(versions) and set(versions) == {0, 1, 3, 4}
        # Asked for the first turn again after each interruption, with the whole turn though it came in pieces.
        assert [(turn.number, len(turn.said)) for turn in tools.turns] == [(0, 20)] * 3 + [(1, 50)]
        assert not mine.state.waiting and not mine.state.fresh

    run(test)


@pytest.mark.parametrize("mode", ["strict", "reorder", "partial"])
@pytest.mark.parametrize("seed", range(12))
def test_whatever_interrupts_them_samples_are_as_if_nothing_had(mode, seed):
    """Random turns, slow and fast tools, rounds that are cancelled at any moment: each response is what it would be in
    one piece, its generated tokens have versions in order, and no prompt is lost or comes twice."""

    async def test() -> None:
        chance = random.Random(seed)
        scripts = [[chance.randint(1, 12) for _ in range(chance.randint(1, 4))] for _ in range(12)]
        rules = {"num_prompts": 3, "num_responses": 2, "eta_prompts": 1.5, "max_staleness": 99, "max_deferrals": 3}
        mine, engine, returned = admitter(*scripts, mode=mode, **rules), Played(), {}

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
            events = await all_of(round_)
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
            for sample in group.kept():
                output = sample.output
                assert output.token_ids == wanted and output.finish_reason == "stop"
                assert output.mask() == [token != TOOL for token in wanted]
                assert output.tokens == sum(scripts[index])
                versions = [version for version in output.versions() if version is not None]
                assert versions == sorted(versions) and (mode == "partial" or len(set(versions)) == 1)

    run(test)


def test_a_turn_that_was_over_is_not_generated_again():
    """An interrupted sample whose tool had not answered is not in the engine when it goes on; nor if it is again
    stopped before it has begun."""
    prefix = Output(spans=[Span(0, 2)], token_ids=[7, 9], logprobs=[0.0] * 2, asked=True)
    assert prefix.followed_by(Output()).asked
    assert not prefix.followed_by(Output(spans=[Span(None, 1)], token_ids=[TOOL])).asked
    assert not prefix.followed_by(Output(finish_reason="stop")).asked
    assert Output(token_ids=[7], spans=[Span(0, 1)]).followed_by(Output(asked=True)).asked


def test_what_was_said_in_pieces_is_one_turn():
    output = Output(spans=[Span(0, 1), Span(None, 2), Span(1, 1), Span(2, 2)], token_ids=[9, 5, 5, 7, 7, 9])
    turn = turn_of((0, 0, 0, 3), {}, output, str)
    assert (turn.number, turn.said, turn.text) == (1, [7, 7, 9], "[7, 7, 9]")


@pytest.mark.parametrize("mode", ["strict", "partial"])
def test_weights_that_change_while_a_tool_works_cancel_the_round(mode):
    """In ``partial`` what was said before is kept: it is all of the round's weights."""

    async def test() -> None:
        engine, tools = Played(), Tools()
        tools.open.clear()
        mine = admitter([3, 4], mode=mode)
        round_ = begun(mine, engine, tools, version=6)
        await tools.asked.wait()
        engine.weights += 1
        tools.open.set()
        with pytest.raises(WeightsChanged):
            await all_of(round_)
        await round_.wait()
        groups = mine.state.waiting + mine.state.fresh
        output = groups[0].samples[0].output
        assert output.token_ids == ([7, 7, 9] if mode == "partial" else [])
        assert output.asked == (mode == "partial")

    run(test)
