"""Rounds on an engine that is played: launches, aborts, clients that go away, weights that change."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from sglang_pat.rollout import rounds
from sglang_pat.rollout.records import Group, Key, Output
from sglang_pat.rollout.requests import check_params, output_of
from sglang_pat.rollout.rounds import RolloutRound, WeightsChanged

from .rounds_world import STEP, Played, admitter, all_of

pytestmark = pytest.mark.unit


def test_a_round_gives_its_groups_and_then_its_summary():
    async def run():
        engine, mine = Played(), admitter()
        *groups, summary = await all_of(RolloutRound(mine, engine, 5, {"max_new_tokens": 50}))
        assert all(isinstance(group, Group) for group in groups)
        assert summary.returned == 2 == len(groups)
        assert not engine.running
        for sample in (sample for group in groups for sample in group.kept()):
            assert sample.output.token_ids == [7777] * 3
            assert sample.output.versions() == [5] * 3
            assert len(sample.output.logprobs) == 3
        return summary

    assert asyncio.run(run()).kind == "short"


def test_an_epoch_round_by_round():
    async def run():
        mine, engine, returned = admitter(), Played(), []
        for version in range(3):
            *groups, summary = await all_of(RolloutRound(mine, engine, version, {"max_new_tokens": 50}))
            returned += [group.key.index for group in groups]
            assert not engine.running
        assert sorted(returned) == list(range(6))

    asyncio.run(run())


def test_a_deferred_prompt_is_drawn_until_it_is_long_again():
    """The draws of its long round: one, two and four of them; the first of those four is long."""
    lengths = iter([200, 200, *6 * [1], 60, 60, *6 * [1]])

    class Drawn(Played):
        async def generate(self, rid, prompt, params) -> Output:
            tokens = next(lengths) if prompt["input_ids"][0] == 200 else 10
            return await super().generate(rid, {"input_ids": [tokens]}, params)

    async def run():
        rules = dict(num_prompts=1, eta_prompts=2.0, unbiased=True)
        engine, mine = Drawn(), admitter(lengths=(10, 200), **rules)
        (first, _), (second, summary) = [
            await all_of(RolloutRound(mine, engine, version, {"max_new_tokens": 300})) for version in range(2)
        ]
        assert [group.key.index for group in (first, second)] == [0, 1]
        assert summary.kept_lengths == [60, 60]
        assert (summary.redraws, summary.gave_up) == (3, 0)
        assert not engine.running

    asyncio.run(run())


def test_an_abort_that_overtakes_its_request_is_sent_again(monkeypatch):
    monkeypatch.setattr(rounds, "ABORT_AGAIN_SECONDS", 0.02)

    async def run():
        engine, mine = Played(), admitter(lengths=(3, 3, 4000, 3), end=False)
        engine.deaf = 4
        await all_of(RolloutRound(mine, engine, 0, {"max_new_tokens": 5000}))
        assert engine.aborts > 4
        assert not engine.running

    asyncio.run(asyncio.wait_for(run(), 20))


def test_a_client_that_goes_away_aborts_its_round():
    async def run():
        engine, mine = Played(), admitter(lengths=(3, 30, 30, 30))
        round_ = RolloutRound(mine, engine, 0, {"max_new_tokens": 50})
        async with aclosing(aiter(round_)) as events:
            async for event in events:
                assert event.key == Key(0, 0)
                break
        await round_.wait()
        assert not engine.running
        assert round_.summary.cancelled
        assert mine.state.round is None
        assert [group.key.index for group in mine.state.fresh] == [0, 1, 2, 3]
        assert mine.state.drawn == 0

    asyncio.run(run())


@pytest.mark.parametrize("told", [True, False])
def test_weights_that_change_in_a_round_cancel_it(told):
    async def run():
        engine, mine = Played(), admitter()
        round_ = RolloutRound(mine, engine, 0, {"max_new_tokens": 50})
        await asyncio.sleep(2 * STEP)
        engine.weights += 1
        if told:
            round_.weights_changed()
        with pytest.raises(WeightsChanged):
            await all_of(round_)
        await round_.wait()
        assert len(mine.state.fresh) == 6
        assert not engine.running

    asyncio.run(run())


def test_an_error_of_the_engine_is_raised_and_nothing_is_lost():
    async def run():
        engine, mine = Played(), admitter(lengths=(3, -1, 3, 3))
        round_ = RolloutRound(mine, engine, 0, {"max_new_tokens": 50})
        with pytest.raises(ValueError, match="refused"):
            await all_of(round_)
        await round_.wait()
        assert len(mine.state.fresh) == 4
        assert not engine.running

    asyncio.run(run())


def test_a_verdict_decides_what_is_returned():
    async def run():
        engine, mine = Played(), admitter(lengths=(3, 4, 5, 6), filter_groups=True)
        round_ = RolloutRound(mine, engine, 0, {"max_new_tokens": 50}, lambda group: group.index != 0)
        *groups, summary = await all_of(round_)
        assert summary.filtered == 1
        assert len(groups) == 2 and 0 not in [group.index for group in groups]

    asyncio.run(run())


def test_a_verdict_and_the_trainer_get_the_text_of_all_tokens(monkeypatch):
    """The played engine tells half a character, as the real one where a response was interrupted."""
    generate = Played.generate

    async def half(self, *given):
        output = await generate(self, *given)
        output.text = "well \ufffd"
        return output

    async def run():
        monkeypatch.setattr(Played, "generate", half)
        mine = admitter(lengths=(3, 3, 3), filter_groups=True)
        judged = []
        round_ = RolloutRound(mine, Played(), 0, {"max_new_tokens": 50}, lambda group: judged.append(group) or True)
        *groups, _ = await all_of(round_)
        assert {sample.output.text for group in (*judged, *groups) for sample in group.kept()} == {"3 tokens"}
        assert len(judged) >= len(groups) == 2

    asyncio.run(run())


@pytest.mark.parametrize("asked", ["judge", "more"])
def test_the_end_of_an_iterator_in_a_callback_ends_the_round(asked):
    """No future takes a StopIteration: whoever waits for one would wait for ever."""

    def ends(_):
        return next(iter(()))

    async def run():
        mine = admitter(lengths=(3, 3, 3), end=False, filter_groups=True)
        given = {"judge": ends} if asked == "judge" else {"judge": lambda _: False, "more": ends}
        round_ = RolloutRound(mine, Played(), 0, {"max_new_tokens": 50}, **given)
        with pytest.raises(RuntimeError, match="ends raised StopIteration; at the end of the data return fewer"):
            await asyncio.wait_for(all_of(round_), 60)
        await round_.wait()

    asyncio.run(run())


@pytest.mark.parametrize("mode", ["strict", "partial"])
def test_prompts_that_came_in_a_round_stay_when_it_is_taken_back(mode):
    async def run():
        mine = admitter(mode, (3, 3, 3), end=False, eta_responses=1.0)
        round_ = RolloutRound(mine, Played(), 0, {"max_new_tokens": 50})
        assert round_.feed(iter([((0, 7), {"input_ids": [3]})]), end_of=0)
        await all_of(round_)
        round_.take_back()
        assert [group.key.index for group in mine.state.fresh] == [0, 1, 2, 7]
        with pytest.raises(ValueError, match="epoch"):
            mine.feed([((0, 8), {"input_ids": [3]})])

    asyncio.run(run())


def test_partial_resumes_with_prefix_and_what_is_left_of_the_limit():
    async def run():
        rules = dict(num_prompts=1, num_responses=1, eta_prompts=2.0, max_staleness=3)
        mine = admitter("partial", lengths=(3, 60, 3, 3), **rules)
        engine, found, params = Played(), [], {"max_new_tokens": 50, "min_new_tokens": 20}
        params["custom_params"] = {"mine": 1}
        for version in range(4):
            *groups, summary = await all_of(RolloutRound(mine, engine, version, params))
            found += groups
        assert sorted(group.key.index for group in found) == [0, 1, 2, 3]
        long = next(group for group in found if group.key.index == 1).kept()[0].output
        assert long.finish_reason == "length"
        assert long.text == "50 tokens"
        assert len(long.token_ids) == len(long.logprobs) == len(long.versions()) == 50
        assert [span.version for span in long.spans] == sorted({span.version for span in long.spans})
        resumed = [(ids, params) for ids, params in engine.calls if ids[0] == 60 and 7777 in ids]
        assert resumed
        assert all(ids.count(7777) + params["max_new_tokens"] == 50 for ids, params in resumed)
        assert all(params["min_new_tokens"] == max(0, 20 - ids.count(7777)) for ids, params in resumed)
        # So that policies know the prompt that it answers, and how far it is.
        assert all(params["custom_params"] == {"pat_generated": ids.count(7777), "mine": 1} for ids, params in resumed)
        assert all(params["custom_params"] == {"mine": 1} for ids, params in engine.calls if 7777 not in ids)

    asyncio.run(run())


def test_interrupted_in_its_last_step():
    """All tokens are there, the engine had no time to say so: nothing is generated any more."""

    class Late(Played):
        async def generate(self, rid, prompt, params) -> Output:
            output = await super().generate(rid, prompt, params)
            if len(output.token_ids) == params["max_new_tokens"] and not self.aborts:
                output.finish_reason = ""
            return output

    async def run():
        mine = admitter(lengths=(9, 9, 9, 9), num_responses=1, num_prompts=1, mode="partial", eta_prompts=1.0)
        engine = Late()
        *groups, summary = await all_of(RolloutRound(mine, engine, 0, {"max_new_tokens": 4}))
        assert groups[0].kept()[0].output.finish_reason == "length"
        assert len(groups[0].kept()[0].output.token_ids) == 4
        assert len(engine.calls) == 1

    asyncio.run(run())


def test_samples_of_a_prompt_have_seeds_of_their_own():
    async def run():
        engine, mine = Played(), admitter(lengths=(3, 3), num_prompts=1, num_responses=3, eta_responses=1.0)
        await all_of(RolloutRound(mine, engine, 0, {"max_new_tokens": 5, "sampling_seed": 10}))
        assert sorted(p["sampling_seed"] for ids, p in engine.calls if ids[1] == 0) == [10, 11, 12]

    asyncio.run(run())


def test_a_trainer_who_is_behind_has_whole_groups_when_the_round_fails():
    """Those that it has read stay as they were; the next event is the error."""

    async def run():
        engine, mine = Played(), admitter(num_prompts=3, eta_prompts=1.0, eta_responses=1.0, lengths=(3, 3, 40))
        round_, read = RolloutRound(mine, engine, 0, {"max_new_tokens": 50}), []
        with pytest.raises(WeightsChanged):
            async with aclosing(aiter(round_)) as events:
                async for event in events:
                    read += [event]
                    while len(engine.running) > 2:
                        await asyncio.sleep(STEP)
                    round_.weights_changed()
                    await round_.wait()
        assert [[sample.output.token_ids for sample in group.kept()] for group in read] == [[[7777] * 3] * 2]

    asyncio.run(run())


def test_the_engine_is_told_of_a_round_before_its_samples_and_after_them():
    class Slow(Played):
        async def begin_round(self, begun) -> None:
            assert not self.calls
            await asyncio.sleep(5 * STEP)
            assert not self.calls
            await super().begin_round(begun)

    async def run():
        engine = Slow()
        await all_of(RolloutRound(admitter(), engine, 0, {"max_new_tokens": 50}))
        begun, ended = engine.told
        assert ended == begun.name
        assert (begun.requests, begun.prompts, begun.prompt_tokens, begun.max_new_tokens) == (6, 3, 2, 50)
        engine = Slow()
        await all_of(RolloutRound(admitter("partial"), engine, 0, {"max_new_tokens": 50}))
        assert engine.told[0].requests is None and engine.told[0].prompt_tokens == 2

    asyncio.run(run())


@pytest.mark.parametrize("fault", ["refuses", "is left"])
def test_a_round_that_never_began_on_the_engine(fault):
    """It refuses, or its user leaves before it has answered: nothing was sent, and the prompts are where they were."""

    class Refusing(Played):
        async def begin_round(self, begun) -> None:
            await asyncio.sleep(5 * STEP)
            if fault == "refuses":
                raise ConnectionError("nobody there")

    async def run():
        engine, mine = Refusing(), admitter()
        round_ = RolloutRound(mine, engine, 0, {"max_new_tokens": 50})
        if fault == "refuses":
            with pytest.raises(ConnectionError, match="nobody there"):
                await all_of(round_)
        else:
            await asyncio.sleep(STEP)
            round_.cancel()
        await round_.wait()
        assert not engine.calls and len(mine.state.fresh) == 6 and mine.state.round is None

    asyncio.run(asyncio.wait_for(run(), 20))


@pytest.mark.parametrize(
    ("mode", "params", "said"),
    [
        ("strict", {"max_new_tokens": 5, "n": 2}, "n is 2, must be 1"),
        ("strict", {}, "max_new_tokens is None, must be a whole number, at least 1"),
        ("strict", {"max_new_tokens": 5, "sampling_seed": "x"}, "sampling_seed is 'x'"),
        ("partial", {"max_new_tokens": 5, "stop": ["."]}, "stop: not in partial"),
    ],
)
def test_parameters_that_rounds_cannot_have(mode, params, said):
    with pytest.raises(ValueError, match=f"sampling_params.{said}"):
        check_params(params, mode)
    fine = {"max_new_tokens": 5, "repetition_penalty": 1.0, "stop": [], "top_p": None}
    assert check_params(fine, mode) == {"max_new_tokens": 5, "repetition_penalty": 1.0, "stop": []}


def test_an_abort_in_the_step_of_the_last_token():
    def reason(ids, **params):
        answer = {"meta_info": {"finish_reason": {"type": "abort"}}, "output_ids": ids}
        return output_of(answer, params, [2]).finish_reason

    assert reason([5, 2]) == "stop" and reason([5, 9], stop_token_ids=[9]) == "stop"
    assert reason([5, 9]) == reason([]) == reason([5, 2], ignore_eos=True) == ""
