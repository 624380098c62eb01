"""Rounds on an engine that is played: launches, aborts, clients that go away, what a user's functions answer."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
from contextlib import aclosing

import numpy as np
import pytest

from sglang_pat import messages
from sglang_pat.rollout import rounds
from sglang_pat.rollout.admitter import Admitter
from sglang_pat.rollout.records import Group, Output, PromptKey, Summary
from sglang_pat.rollout.requests import check_params, make_output
from sglang_pat.rollout.rounds import RolloutRound, WeightsChanged

from .admission_world import dumps, loads
from .rounds_world import FOREVER, SAID, Played, admitter, list_events

pytestmark = pytest.mark.unit

EPOCH = (3, 3, 3, 40, 3, 40)


async def test_a_round_gives_its_groups_and_then_its_summary():
    engine, mine = Played(), admitter(*EPOCH)
    *groups, summary = await list_events(RolloutRound(mine, engine, 5, {"max_new_tokens": 50}))
    assert all(isinstance(group, Group) for group in groups)
    assert summary.kind == "short" and summary.returned == 2 == len(groups)
    assert not engine.running
    for sample in (sample for group in groups for sample in group.list_kept()):
        assert sample.output.token_ids == [SAID] * 3
        assert sample.output.list_versions() == [5] * 3
        assert len(sample.output.logprobs) == 3


async def test_an_abort_that_overtakes_its_request_is_sent_again(monkeypatch):
    monkeypatch.setattr(rounds, "ABORT_AGAIN_SECONDS", 0.02)

    engine, mine = Played(), admitter(3, 3, FOREVER, 3, end=False)
    engine.deaf = 4
    await list_events(RolloutRound(mine, engine, 0, {"max_new_tokens": FOREVER}))
    assert engine.aborts > 4
    assert not engine.running


async def test_a_client_that_goes_away_aborts_its_round():
    engine, mine = Played(), admitter(3, 30, 30, 30)
    round_ = RolloutRound(mine, engine, 0, {"max_new_tokens": 50})
    async with aclosing(aiter(round_)) as events:
        async for event in events:
            assert event.key == PromptKey(0, 0)
            break
    await round_.wait()
    assert not engine.running
    assert round_.summary.cancelled
    assert mine.state.round is None
    assert [group.key.index for group in mine.state.fresh] == [0, 1, 2, 3]
    assert mine.state.drawn == 0


@pytest.mark.parametrize("told", [True, False])
async def test_weights_that_change_in_a_round_cancel_it(told):
    engine, mine = Played(), admitter(*[40] * 6)
    round_ = RolloutRound(mine, engine, 0, {"max_new_tokens": 50})
    while not engine.running:
        await asyncio.sleep(0)
    engine.weights += 1
    if told:
        round_.cancel_for_new_weights()
    with pytest.raises(WeightsChanged):
        await list_events(round_)
    await round_.wait()
    assert len(mine.state.fresh) == 6
    assert not engine.running


async def test_an_error_of_the_engine_is_raised_and_nothing_is_lost():
    engine, mine = Played(), admitter(3, -1, 3, 3)
    round_ = RolloutRound(mine, engine, 0, {"max_new_tokens": 50})
    with pytest.raises(ValueError, match="refused"):
        await list_events(round_)
    await round_.wait()
    assert len(mine.state.fresh) == 4
    assert not engine.running


@pytest.fixture
def half_told(monkeypatch) -> None:
    """The played engine tells half a character, as the real one where a response was interrupted."""
    generate = Played.generate

    async def half(self, *given):
        output = await generate(self, *given)
        output.text = "well \ufffd"
        return output

    monkeypatch.setattr(Played, "generate", half)


async def test_a_verdict_and_the_trainer_get_the_text_of_all_tokens(half_told):
    mine = admitter(3, 3, 3, filter_groups=True)
    judged = []
    round_ = RolloutRound(mine, Played(), 0, {"max_new_tokens": 50}, lambda group: judged.append(group) or True)
    *groups, _ = await list_events(round_)
    assert {sample.output.text for group in (*judged, *groups) for sample in group.list_kept()} == {"7 7 7"}
    assert len(judged) >= len(groups) == 2


@pytest.mark.parametrize("who", ["verdicts", "rewards", "nobody"])
async def test_a_tokenizer_that_fails_ends_the_round(half_told, monkeypatch, who):
    """Slow tokenizers do, of a token in the padding of the vocabulary."""

    def fail(self, token_ids, skip_special_tokens):
        raise TypeError("no such token")

    monkeypatch.setattr(Played, "decode", fail)
    engine, mine = Played(), admitter(3, 3, 3, filter_groups=who == "verdicts")
    reward = (lambda response: 1.0) if who == "rewards" else None
    round_ = RolloutRound(mine, engine, 0, {"max_new_tokens": 50}, reward=reward)
    with pytest.raises(TypeError, match="no such token"):
        await asyncio.wait_for(list_events(round_), 60)
    await round_.wait()
    assert len(mine.state.fresh) == 3 and mine.state.round is None and not engine.running


@pytest.mark.parametrize("asked", ["judge", "more"])
async def test_the_end_of_an_iterator_in_a_callback_ends_the_round(asked):
    """No future takes a StopIteration: whoever waits for one would wait for ever."""

    def ends(_):
        return next(iter(()))

    mine = admitter(3, 3, 3, end=False, filter_groups=True)
    given = {"judge": ends} if asked == "judge" else {"judge": lambda _: False, "more": ends}
    round_ = RolloutRound(mine, Played(), 0, {"max_new_tokens": 50}, **given)
    with pytest.raises(RuntimeError, match="ends raised StopIteration; at the end of the data return fewer"):
        await asyncio.wait_for(list_events(round_), 60)
    await round_.wait()


@pytest.mark.parametrize("mode", ["strict", "partial"])
async def test_prompts_that_came_in_a_round_stay_when_it_is_taken_back(mode):
    mine = admitter(3, 3, 3, mode=mode, end=False)
    round_ = RolloutRound(mine, Played(), 0, {"max_new_tokens": 50})
    round_.tell(mine.feed, [((0, 7), {"input_ids": [3]})])
    await list_events(round_)
    round_.undo()
    assert [group.key.index for group in mine.state.fresh] == [0, 1, 2, 7]


async def test_partial_resumes_with_prefix_and_what_is_left_of_the_limit():
    rules = dict(num_prompts=1, num_responses=1, eta_prompts=2.0, max_staleness=3)
    mine = admitter(3, 60, 3, 3, mode="partial", **rules)
    engine, found, params = Played(), [], {"max_new_tokens": 50, "min_new_tokens": 20}
    params["custom_params"] = {"mine": 1}
    for version in range(4):
        *groups, summary = await list_events(RolloutRound(mine, engine, version, params))
        found += groups
    assert sorted(group.key.index for group in found) == [0, 1, 2, 3]
    long = next(group for group in found if group.key.index == 1).list_kept()[0].output
    assert long.finish_reason == "length"
    assert long.text == " ".join(["7"] * 50)
    assert len(long.token_ids) == len(long.logprobs) == len(long.list_versions()) == 50
    assert [span.version for span in long.spans] == sorted({span.version for span in long.spans})
    resumed = [(ids, params) for ids, params in engine.calls if ids[0] == 60 and SAID in ids]
    assert resumed
    assert all(ids.count(SAID) + params["max_new_tokens"] == 50 for ids, params in resumed)
    assert all(params["min_new_tokens"] == max(0, 20 - ids.count(SAID)) for ids, params in resumed)
    # So that policies know the prompt that it answers, and how far it is.
    assert all(params["custom_params"] == {"pat_generated": ids.count(SAID), "mine": 1} for ids, params in resumed)
    assert all(params["custom_params"] == {"mine": 1} for ids, params in engine.calls if SAID not in ids)


async def test_interrupted_in_its_last_step():
    """All tokens are there, the engine had no time to say so: nothing is generated any more."""

    class Late(Played):
        async def generate(self, rid, prompt, params) -> Output:
            output = await super().generate(rid, prompt, params)
            if len(output.token_ids) == params["max_new_tokens"] and not self.aborts:
                output.finish_reason = ""
            return output

    mine = admitter(9, 9, 9, 9, num_responses=1, num_prompts=1, mode="partial", eta_prompts=1.0)
    engine = Late()
    *groups, summary = await list_events(RolloutRound(mine, engine, 0, {"max_new_tokens": 4}))
    assert groups[0].list_kept()[0].output.finish_reason == "length"
    assert len(groups[0].list_kept()[0].output.token_ids) == 4
    assert len(engine.calls) == 1


async def test_samples_of_a_prompt_have_seeds_of_their_own():
    engine, mine = Played(), admitter(3, 4, num_prompts=1, num_responses=3)
    await list_events(RolloutRound(mine, engine, 0, {"max_new_tokens": 5, "sampling_seed": 10}))
    assert sorted(p["sampling_seed"] for ids, p in engine.calls if ids[0] == 3) == [10, 11, 12]


async def test_a_trainer_who_is_behind_has_whole_groups_when_the_round_fails():
    """Groups that it has read stay as they were; the next event is the error."""

    engine, mine = Played(), admitter(3, 3, 40, num_prompts=3, eta_prompts=1.0)
    round_, read = RolloutRound(mine, engine, 0, {"max_new_tokens": 50}), []
    with pytest.raises(WeightsChanged):
        async with aclosing(aiter(round_)) as events:
            async for event in events:
                read += [event]
                while len(engine.running) > 2:
                    await asyncio.sleep(0)
                round_.cancel_for_new_weights()
                await round_.wait()
    assert [[sample.output.token_ids for sample in group.list_kept()] for group in read] == [[[SAID] * 3] * 2]


async def test_the_engine_is_told_of_a_round_before_its_samples_and_after_them():
    class Slow(Played):
        async def begin_round(self, begun) -> None:
            assert not self.calls
            await asyncio.sleep(0.01)
            assert not self.calls
            await super().begin_round(begun)

    engine = Slow()
    await list_events(RolloutRound(admitter(*EPOCH), engine, 0, {"max_new_tokens": 50}))
    begun, ended = engine.told
    assert ended == begun.name
    assert (begun.requests, begun.prompts, begun.prompt_tokens, begun.max_new_tokens) == (6, 3, 1, 50)
    assert begun.kind == "short"
    engine = Slow()
    await list_events(RolloutRound(admitter(*EPOCH, mode="partial"), engine, 0, {"max_new_tokens": 50}))
    assert engine.told[0].requests is None and engine.told[0].prompt_tokens == 1
    engine, mine = Slow(), admitter(3)  # less than a batch: it runs to its end
    await list_events(RolloutRound(mine, engine, 0, {"max_new_tokens": 50}))
    assert (engine.told[0].requests, engine.told[0].kind) == (2, "long")


async def test_a_prompt_that_is_none_ends_the_round():
    mine = admitter(end=False)
    mine.feed([((0, index), 5) for index in range(2)], end_of=0)
    round_ = RolloutRound(mine, Played(), 0, {"max_new_tokens": 50})
    with pytest.raises(TypeError):
        await list_events(round_)
    assert len(mine.state.fresh) == 2 and mine.state.round is None, "another round may begin"


async def test_a_round_of_more_samples_than_policies_compute_with_has_no_size(monkeypatch):
    monkeypatch.setattr(messages, "MOST_IN_ROUND", 5)
    engine = Played()
    await list_events(RolloutRound(admitter(*EPOCH), engine, 0, {"max_new_tokens": 50}))
    assert (engine.told[0].requests, engine.told[0].prompts, engine.told[0].kind) == (None, None, "short")


@pytest.mark.parametrize("fault", ["refuses", "is left"])
async def test_a_round_that_never_began_on_the_engine(fault):
    """The engine refuses, or its user leaves first: nothing was sent, and the prompts are where they were."""

    class Refusing(Played):
        async def begin_round(self, begun) -> None:
            await asyncio.sleep(0.01)
            if fault == "refuses":
                raise ConnectionError("nobody there")

    engine, mine = Refusing(), admitter(*EPOCH)
    round_ = RolloutRound(mine, engine, 0, {"max_new_tokens": 50})
    if fault == "refuses":
        with pytest.raises(ConnectionError, match="nobody there"):
            await list_events(round_)
    else:
        await asyncio.sleep(0)
        round_.cancel()
    await round_.wait()
    assert not engine.calls and len(mine.state.fresh) == 6 and mine.state.round is None


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
        return make_output(answer, params, [2]).finish_reason

    assert reason([5, 2]) == "stop" and reason([5, 9], stop_token_ids=[9]) == "stop"
    assert reason([5, 9]) == reason([]) == reason([5, 2], ignore_eos=True) == ""


# -- what a user's functions answer -----------------------------------------------------------------------------


async def run_round(mine: Admitter, judge, *more) -> list:
    return await list_events(RolloutRound(mine, Played(), 0, {"max_new_tokens": 50}, judge, *more))


@pytest.mark.parametrize("mode", ["strict", "partial"])
async def test_numpys_truth_and_numbers(mode):
    mine = admitter(3, 3, 3, mode=mode, filter_groups=True, end=False)
    mine.feed([((np.int64(0), np.int64(7)), {"input_ids": [3, 7]})])
    assert (await run_round(mine, lambda group: np.float64(1.0) > 0))[-1].returned == 2
    again = loads(dumps(mine), mine.rules)
    assert again.state.verdicts[0] > 0 and type(again.state.verdicts[0]) is float


@pytest.mark.parametrize("error", [asyncio.CancelledError, concurrent.futures.CancelledError])
async def test_a_verdict_that_was_cancelled_ends_the_round(error):
    def judge(group):
        raise error("the pool was closed")

    with pytest.raises(RuntimeError, match="a callback was cancelled"):
        await run_round(admitter(3, 3, filter_groups=True), judge)


async def test_prompts_of_the_next_epoch_are_kept_for_it():
    """A source that has no end goes on with the next epoch: of this one there are no others."""
    mine, asked = admitter(3, 3, 3, filter_groups=True, end=False), []
    indices = itertools.count()

    def more(count):
        asked.append(count)
        return [((1, next(indices)), {"input_ids": [3, 1]}) for _ in range(count)]

    *_, summary = await run_round(mine, lambda group: False, more)
    assert isinstance(summary, Summary) and summary.returned == 0 and len(asked) <= 4


async def test_what_fails_after_the_end_of_a_round_takes_nothing_away():
    """A verdict that is not needed any more does not take its cancelling."""
    round_, told = RolloutRound(admitter(3, 3, eta_prompts=1.0), Played(), 0, {"max_new_tokens": 50}), []
    async for event in round_:
        told.append(type(event))
        while round_.summary is None:
            await asyncio.sleep(0)
        round_.fail(RuntimeError("too late"))
    assert told == [Group, Group, Summary]


@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("mode", ["strict", "partial"])
async def test_an_engine_that_aborts_everything_ends_the_round(mode, tokens):
    class Aborting(Played):
        async def generate(self, rid, prompt, params) -> Output:
            self.calls.append((prompt["input_ids"], params))
            return Output(token_ids=[7] * tokens, logprobs=[0.0] * tokens)

    engine, mine = Aborting(), admitter(3, 3, 3, 40, 3, 40, mode=mode)
    before = dumps(mine)
    limit = 5000 if mode == "strict" else 50
    round_ = RolloutRound(mine, engine, 0, {"max_new_tokens": limit})
    if mode == "partial" and tokens:  # a token each time: that is progress
        *_, summary = await list_events(round_)
        assert summary.returned == 2
        return
    with pytest.raises(RuntimeError, match=f"aborted 16 times after {tokens} tokens, not by its round"):
        await list_events(round_)
    assert len(engine.calls) <= 16 * 6
    assert round_.summary.cancelled
    mine.state.thrown = 0
    assert dumps(mine) == before


# -- large rounds do not hold up the event loop ----------------------------------------------------------------


class Counting(Played):
    """Counts what it is asked to do in each turn of the event loop."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = 0
        self.asked: dict[int, int] = {}

    def _ask(self) -> None:
        self.asked[self.turn] = self.asked.get(self.turn, 0) + 1

    async def generate(self, rid, prompt, params) -> Output:
        self._ask()
        return await super().generate(rid, prompt, params)

    def abort(self, rid) -> None:
        self._ask()
        super().abort(rid)

    async def count(self) -> None:
        while True:
            self.turn += 1
            await asyncio.sleep(0)


async def test_a_large_round_never_keeps_the_event_loop_for_long():
    """A hundred samples are started and, when the client goes, aborted: a slice of them in each turn of the loop."""

    engine, mine = Counting(), admitter(*[FOREVER] * 30, num_prompts=20, num_responses=3)
    counting = asyncio.ensure_future(engine.count())
    round_ = RolloutRound(mine, engine, 0, {"max_new_tokens": FOREVER})
    assert not engine.calls, "nothing is started in the call itself"
    while len(engine.running) < 90:
        await asyncio.sleep(0)
    round_.cancel()
    await round_.wait()
    counting.cancel()
    assert engine.aborts == 90
    # A turn may have one slice's samples begin and another's be aborted.
    assert max(engine.asked.values()) <= 2 * rounds.SLICE


async def test_what_was_not_yet_started_is_not_started_for_a_client_that_is_gone():
    engine, mine = Played(), admitter(*[FOREVER] * 30, num_prompts=20)
    round_ = RolloutRound(mine, engine, 0, {"max_new_tokens": FOREVER})
    await asyncio.sleep(0)
    round_.cancel()
    await round_.wait()
    assert len(engine.calls) <= rounds.SLICE
    assert round_.summary.cancelled
    assert len(mine.state.fresh) == 30 and not mine.state.waiting
