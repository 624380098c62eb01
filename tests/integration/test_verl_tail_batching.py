"""The replay buffer of tail batching, without engines: responses have drawn lengths, and grow at the same pace."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transfer_queue
from verl.trainer.ppo.v1.replay_buffer import DAPO_FILTERED_REWARD_COUNTS_KEY
from verl.utils import tensordict_utils

from sglang_pat.integrations.verl import options
from sglang_pat.integrations.verl.tail_batching import ChunkedTailBatchingBuffer, NoResponseError, TailBatchingBuffer
from sglang_pat.messages import BeginRound

pytestmark = pytest.mark.integration

WHERE = "trainer.v1.sglang_pat_sync"
BATCH, RESPONSES, LIMIT = 8, 2, 4000
SIZES = {"num_prompts": BATCH, "num_responses": RESPONSES}
STRICT = {"tail_batching": "strict", "eta_prompts": 1.5, "max_deferrals": 4}
SAMPLER = {"max_off_policy_threshold": None, "max_off_policy_strategy": "drop", "sampler_kwargs": {}}
MODES = {"strict": {}, "reorder": {"tail_batching": "reorder"}, "unbiased": {"unbiased": True}}
TEXTS: dict[str, int] = {}
"""Texts of all prompts that were ever submitted, by uid."""


def spread(share: float) -> Callable[[int], bool]:
    """A share of the prompts, in no order."""
    return lambda text: random.Random(text).random() < share


class Response:
    """``tokens`` of the ``length`` that it is going to have."""

    def __init__(self, length: int) -> None:
        self.tokens, self.length = 0, length

    @property
    def there(self) -> bool:
        return self.tokens == self.length


class World(TailBatchingBuffer):
    """verl's workers and its queue: between two looks as many tokens are generated as something takes to end.

    A prompt is noted as ended a look after its last response is there.

    Args:
        look: tokens between two looks, if not so many.
        useless: whether all responses to a prompt have the same reward; None: rewards do not matter.
        named: of the buffer.

    Attributes:
        lengths: of the responses of each prompt that was trained on, by its text.
        tokens: that were generated, in all.
    """

    def __init__(
        self, seed: int, lingering: int = 0, look: int = 0, useless: Callable[[int], bool] | None = None,
        named: Mapping[str, Any] = MappingProxyType({}), **given,
    ) -> None:  # fmt: skip
        self.announced: list[BeginRound] = []
        if useless is not None:
            named = {"filter_groups_metric": "reward", "refill_fn": print, **named}
        super().__init__(
            None, options.make_tail_batching_rules(STRICT | given, WHERE, **SIZES, filter_groups=bool(named)), LIMIT,
            trainer_mode="sync", trainer_config={}, **SAMPLER, **named,
        )  # fmt: skip
        self.rng, self.lingering, self.look = random.Random(seed), lingering, look
        self.useless = useless
        self.texts: dict[str, int] = {}
        self.judged: set[int] = set()
        self.responses: dict[str, list[Response]] = {}
        self.ended: set[str] = set()
        self.started: list[list[int]] = []
        self.lengths: dict[int, list[int]] = {}
        self.fetched = self.stops = self.tokens = 0

    def _fetch(self):
        texts = list(range(self.fetched, self.fetched + 4))
        self.fetched += 4
        uids = np.array([f"u{text}" for text in texts], dtype=object)
        return tensordict_utils.get_tensordict({"uid": uids, "raw_prompt": texts})

    def _announce(self, message) -> None:
        self.announced.append(message)

    def _submit(self, rows) -> None:
        self.started.append([row["raw_prompt"][0] for row in rows])
        for row, text in zip(rows, self.started[-1], strict=True):
            uid = row["uid"][0]
            assert uid not in self.responses, "it is out of the queue before it starts again"
            lengths = [LIMIT if self.rng.random() < 0.1 else self.rng.randint(100, 600) for _ in range(RESPONSES)]
            self.texts[uid], self.responses[uid] = text, [Response(length) for length in lengths]
            TEXTS[uid] = text

    def _stop(self) -> None:
        self.stops += 1
        if self.stops > self.lingering:  # agents may begin another turn
            for response in self.under_way:
                response.length = response.tokens
            self.ended |= self.responses.keys()

    def _take_ends(self) -> dict[str, dict[int, int]]:
        """Nobody tells of a response before it is written."""
        return {}

    def _drop(self, uids) -> None:
        assert uids and uids.isdisjoint(self._taken)

    @property
    def under_way(self) -> list[Response]:
        return [response for found in self.responses.values() for response in found if not response.there]

    def _sync_metadata_from_transfer_queue(self) -> None:
        self.finished_keys["train"] = set(self.ended)
        self.partitions["train"] = {
            # A key comes before its tag.
            f"{uid}_{session}_0": {"status": "success", "response_len": response.tokens} if response.there else {}
            for uid, found in self.responses.items()
            for session, response in enumerate(found)
            if response.there or response.tokens
        }

    def _wait_for_next_poll(self, partition_id, last):
        noted = {uid for uid, found in self.responses.items() if all(response.there for response in found)} - self.ended
        self.ended |= noted
        under_way = [] if noted else self.under_way
        tokens = self.look or min((response.length - response.tokens for response in under_way), default=0)
        for response in under_way:
            before, response.tokens = response.tokens, min(response.tokens + tokens, response.length)
            self.tokens += response.tokens - before
        return last

    def _clear_groups(self, partition_id, uids) -> None:
        self.ended -= uids
        for uid in uids:
            del self.responses[uid]
        self._sync_metadata_from_transfer_queue()

    def _dapo_filtered_keys(self, partition_id):
        """verl's own, with the rewards of this world."""

        def kv_batch_get(keys, partition_id, select_fields):
            return {"rm_scores": [torch.tensor([0.0, self.score(*key.split("_")[:2])]) for key in keys]}

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transfer_queue, "kv_batch_get", kv_batch_get)
            return super()._dapo_filtered_keys(partition_id)

    def score(self, uid: str, session: str) -> float:
        self.judged.add(text := TEXTS[uid])
        return 1.0 if self.useless(text) else float(session)

    def _materialize_batch(self, partition_id, selected_prompt_uids, partition_snapshot):
        assert set(selected_prompt_uids) == self.ended == self.responses.keys(), (
            "what is left in the queue is the batch"
        )
        self.ended.clear()
        texts = [self.texts[uid] for uid in selected_prompt_uids]
        self.lengths |= {
            self.texts[uid]: [response.length for response in found] for uid, found in self.responses.items()
        }
        self.responses.clear()
        return SimpleNamespace(texts=texts)

    def step(self, number: int) -> tuple[list[int], dict[str, float]]:
        """Texts of its batch, and metrics."""
        self.stops = 0
        self.begin(number)
        batch, metrics = self.sample(number, "train", BATCH)
        assert not self.under_way and not self._under_way, "nothing of the step goes on"
        return batch.texts, {name.removeprefix("training/tail_batching/"): value for name, value in metrics.items()}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("lingering", [0, 3])
@pytest.mark.parametrize("mode", MODES)
def test_each_prompt_is_trained_on_once_and_none_waits_for_ever(seed, lingering, mode):
    world, trained, long_rounds, stopped, redraws = World(seed, lingering, **MODES[mode]), [], 0, 0, 0
    for number in range(1, 41):
        texts, metrics = world.step(number)
        assert len(texts) == len(set(texts)) == BATCH
        trained += texts
        long_rounds += metrics["long_round"]
        stopped += metrics["stopped_prompts"]
        redraws += metrics["redraws"]
        assert metrics["oldest_waiting"] <= 4
    assert len(trained) == len(set(trained)) == 40 * BATCH
    begun = {text for texts in world.started for text in texts}
    assert len(begun - set(trained)) == metrics["waiting_prompts"] <= 4 * BATCH
    assert long_rounds >= 1 and stopped >= 10
    assert (redraws > 0) == (mode == "unbiased")


def at_limit(**options) -> float:
    """The share of responses at the limit, of prompts that must have been trained on by the end; the truth is 0.1."""
    found: list[int] = []
    for seed in range(3):
        world, old = World(seed, **options), 0
        for number in range(1, 151):
            world.step(number)
            old = world.fetched if number == 140 else old
        found += [length for text, lengths in world.lengths.items() if text < old - 24 for length in lengths]
    return found.count(LIMIT) / len(found)


def test_lengths_are_those_of_the_model_if_unbiased():
    assert at_limit() < 0.05 and at_limit(tail_batching="reorder") < 0.05
    assert at_limit(unbiased=True) == pytest.approx(0.1, abs=0.012)
    # A short step lasts some 50 looks of 10 tokens: long responses come a little too often.
    assert at_limit(unbiased=True, look=10) == pytest.approx(0.106, abs=0.012)


def test_the_metrics_say_how_much_shorter_responses_are():
    world = World(seed=5)
    for number in range(1, 101):
        _, metrics = world.step(number)
    lengths = [length for found in world.lengths.values() for length in found]
    assert metrics["mean_returned"] == pytest.approx(sum(lengths) / len(lengths), rel=0.15)
    assert metrics["mean_undropped"] == pytest.approx(0.1 * LIMIT + 0.9 * 350, rel=0.15)
    assert 0 < metrics["mean_undropped_error"] < 0.2 * metrics["mean_undropped"]
    assert metrics["mean_seconds"] > 0 and metrics["plain_seconds"] > 0


@pytest.mark.parametrize("useless", [None, spread(0.6)], ids=["", "dapo"])
@pytest.mark.parametrize("mode", MODES)
def test_a_checkpoint_keeps_the_prompts_that_wait(tmp_path, mode, useless):
    """The future after step 7 is the same for the process that goes on and for one that begins there."""
    world = World(seed=3, useless=useless, **MODES[mode])
    for number in range(1, 8):
        world.step(number)
    torch.save(world.get_state(), tmp_path / "state.pt")
    other = World(seed=3, useless=useless, **MODES[mode])
    other.rng.setstate(world.rng.getstate())
    other.fetched = world.fetched
    other.restore(torch.load(tmp_path / "state.pt", weights_only=False), "state.pt")
    assert other._rows.keys() == world._rows.keys() != set()

    def future(one: World) -> list[list[int]]:
        return [one.step(number)[0] for number in range(8, 20)]

    assert future(other) == future(world)


EVICTED = "training/filter_groups/evicted_samples"


@pytest.mark.parametrize("share", [0.5, 0.8])
@pytest.mark.parametrize("mode", MODES)
def test_batches_are_full_however_many_groups_are_useless(share, mode):
    """Useless prompts are gone; those that were passed over wait, and no longer than they may."""
    useless = spread(share)
    world, trained, evicted = World(1, useless=useless, **MODES[mode]), [], 0
    for number in range(1, 21):
        texts, metrics = world.step(number)
        assert len(texts) == len(set(texts)) == BATCH and not any(map(useless, texts))
        trained += texts
        evicted += metrics.get(EVICTED, 0)
        if EVICTED in metrics:
            assert metrics[DAPO_FILTERED_REWARD_COUNTS_KEY] == {1.0: metrics[EVICTED]}
        assert metrics["oldest_waiting"] <= 4
    assert len(trained) == len(set(trained)) == 20 * BATCH
    started = {text for texts in world.started for text in texts}
    fed = {row["raw_prompt"][0] for row in world._rows.values()}
    gone = started - set(trained) - fed
    assert all(map(useless, gone)) and len(gone) == evicted > 20 * BATCH * share / 2
    assert len(fed & started) == metrics["waiting_prompts"] <= 4 * BATCH


def test_a_group_that_was_judged_useless_never_waits():
    """All of a step end between two looks: more of use than the batch has room for, and useless ones among them."""
    world, waited = World(0, look=LIMIT, useless=spread(0.3)), set()
    for number in range(1, 11):
        world.step(number)
        waiting = {world._rows[group.index]["raw_prompt"][0] for group in world._admitter.state.waiting}
        assert not any(map(world.useless, waiting & world.judged))
        waited |= waiting
    assert waited


def test_a_step_starts_no_more_than_it_needs_when_its_batch_is_there():
    """Nothing replaces the useless groups that are seen together with the last of the batch."""
    world = World(0, look=LIMIT, useless=lambda text: text % 12 in (0, 1, 2))
    world.step(1)
    assert len(world.started) == 1 and len(world.started[0]) == 12


def test_a_step_that_finds_too_few_groups_of_use_ends_the_job():
    with pytest.raises(RuntimeError) as ended:
        World(0, useless=lambda text: text > 2, named={"most_batches": 3}).step(1)
    assert str(ended.value) == (
        "step 1: of 24 groups 3 are of use, must be 8, and algorithm.filter_groups.max_num_gen_batches is 3: "
        "give other prompts, a larger number, or 0 for no limit"
    )
    assert len(World(0, useless=lambda text: text % 3 < 2, named={"most_batches": 8}).step(1)[0]) == BATCH


def test_the_engine_is_told_of_each_step_what_is_known_of_it():
    world = World(seed=0)
    kinds = [world.step(number)[1]["long_round"] for number in range(1, 11)]
    assert [begun.kind == "long" for begun in world.announced] == kinds and {0, 1} == {*kinds}
    sizes = {begun.kind: (begun.requests, begun.prompts, begun.max_new_tokens) for begun in world.announced}
    assert sizes == {"short": (24, 12, LIMIT), "long": (16, 8, LIMIT)}
    dapo = World(seed=0, useless=spread(0.5))
    dapo.step(1)
    assert dapo.announced == [BeginRound(kind="short", max_new_tokens=LIMIT)], "nobody knows how many"


class Failing(World):
    """A manager whose agents raise for prompts of some texts."""

    def __init__(self, *args, fails, **named) -> None:
        super().__init__(*args, **named)
        self.fails = fails

    def _submit(self, rows) -> None:
        super()._submit(rows)
        for row, text in zip(rows, self.started[-1], strict=True):
            if self.fails(text):
                self.responses[row["uid"][0]] = []

    def _sync_metadata_from_transfer_queue(self) -> None:
        super()._sync_metadata_from_transfer_queue()
        self.failure_keys["train"] = {uid for uid in self.ended if not self.responses[uid]}
        self.finished_keys["train"] -= self.failure_keys["train"]


def test_prompts_that_have_failed_are_left_out_of_the_step():
    """Training is on what there is of a step, as in verl."""
    world = Failing(1, fails=lambda text: text == 1)
    texts, metrics = world.step(1)
    assert 1 in texts and len(texts) == BATCH and metrics["failed_prompts"] == 1
    assert world.step(2)[1]["failed_prompts"] == 0


def test_prompts_that_have_failed_are_replaced_if_verl_is_to():
    refills = {"sync_refill_failed_groups": True, "refill_fn": print, "gen_batch_size": 1}
    world = Failing(1, fails=lambda text: text == 1, named=refills)
    texts, metrics = world.step(1)
    assert 1 not in texts and len(texts) == BATCH and metrics["failed_prompts"] == 0
    assert metrics["training/rollout_failure/evicted_samples"] == 1
    assert EVICTED not in metrics and 1 not in {row["raw_prompt"][0] for row in world._rows.values()}


def test_a_step_of_failed_prompts_alone_ends_the_job():
    with pytest.raises(RuntimeError, match=f"no response to train on: all {BATCH} prompts of the step have failed"):
        Failing(1, fails=lambda text: True).step(1)


def test_all_prompts_of_a_step_are_fed_at_once(monkeypatch):
    """Each call goes through all keys that there ever were."""
    fed, world = [], World(seed=0)
    feed = world._admitter.feed
    monkeypatch.setattr(world._admitter, "feed", lambda prompts: fed.append(len(prompts)) or feed(prompts))
    world.begin(0)
    assert len(fed) == 1 and fed[0] == world.fetched >= BATCH


class Rewarding(World):
    """Rewards take ``lag`` looks, but for what was stopped or dropped; ``tells``: a response's end is known before."""

    def __init__(self, seed: int, lag: int, tells: bool, **options) -> None:
        self.lag, self.tells = lag, tells
        self.waited: dict[Response, int] = {}
        self.told: set[Response] = set()
        super().__init__(seed, **options)

    def _take_ends(self) -> dict[str, dict[int, int]]:
        found: dict[str, dict[int, int]] = {}
        for uid, responses in self.responses.items():
            for session, response in enumerate(responses):
                if self.tells and response.there and response not in self.told:
                    self.told.add(response)
                    found.setdefault(uid, {})[session] = response.tokens
        return found

    def _drop(self, uids) -> None:
        super()._drop(uids)
        if self.tells:
            self.waited.update({response: self.lag for uid in uids for response in self.responses[uid]})

    def _stop(self) -> None:
        cut = self.under_way
        super()._stop()
        self.waited.update(dict.fromkeys(cut, self.lag))
        self.told.update(cut)

    def _sync_metadata_from_transfer_queue(self) -> None:
        super()._sync_metadata_from_transfer_queue()
        for uid, responses in self.responses.items():
            left = [session for session, response in enumerate(responses) if self.waited.get(response, 0) < self.lag]
            for session in left:
                self.partitions["train"].pop(f"{uid}_{session}_0", None)
            if left:
                self.finished_keys["train"].discard(uid)

    def _wait_for_next_poll(self, partition_id, last):
        for responses in self.responses.values():
            for response in responses:
                self.waited[response] = self.waited.get(response, 0) + response.there
        return super()._wait_for_next_poll(partition_id, last)


@pytest.mark.parametrize("mode", MODES)
def test_a_step_does_not_wait_for_rewards_to_know_which_prompts_it_takes(mode):
    """The step takes the same prompts as if rewards took no time, and generates not one token more."""

    def train(world: World) -> tuple[list[list[int]], int]:
        return [world.step(number)[0] for number in range(1, 21)], world.tokens

    texts, tokens = train(World(4, **MODES[mode]))
    assert train(Rewarding(4, lag=5, tells=True, **MODES[mode])) == (texts, tokens)
    assert train(Rewarding(4, lag=5, tells=False, **MODES[mode]))[1] > 1.02 * tokens


class ChunkedWorld(World, ChunkedTailBatchingBuffer):
    """A trainer that takes groups as they come; what it has stays in the queue until the step is over."""

    def _sync_metadata_from_transfer_queue(self) -> None:
        self.ended -= self._given
        super()._sync_metadata_from_transfer_queue()

    def _wait_for_next_poll(self, partition_id, last):
        self.ended |= self._given  # of which nothing is noted
        return super()._wait_for_next_poll(partition_id, last)

    def _materialize_batch(self, partition_id, selected_prompt_uids, partition_snapshot):
        keys = [key for key in partition_snapshot if key.split("_")[0] in selected_prompt_uids]
        assert len(keys) in (0, RESPONSES * len(selected_prompt_uids)), "whole groups"
        return SimpleNamespace(texts=[self.texts[uid] for uid in selected_prompt_uids], keys=keys)

    def step(self, number: int) -> tuple[list[int], dict[str, float]]:
        self.stops, texts, metrics = 0, [], {}
        self.chunks = 0
        self.begin(number)
        while len(texts) < BATCH:
            there, _ = self.wait_for_sampleable(number, "train", 1)
            assert self.get_sampleable_count(number, "train") >= len(there) >= 1
            try:
                batch, found = self.sample(number, "train", len(there))
            except NoResponseError:
                batch, found = SimpleNamespace(texts=list(there), keys=[]), {}
            texts += batch.texts if batch.keys else [None] * len(there)
            metrics |= found
            self.chunks += 1
        assert not self._list_sampleable(), "not one more than the batch"
        metrics |= self.end_step(number)
        assert not self.under_way and not self._under_way and self.responses.keys() == set(self._taken)
        self.responses.clear()
        self.ended.clear()
        return texts, {name.removeprefix("training/tail_batching/"): value for name, value in metrics.items()}


class ChunkedFailing(Failing, ChunkedWorld):
    pass


@pytest.mark.parametrize("useless", [None, spread(0.6)], ids=["", "dapo"])
@pytest.mark.parametrize("mode", MODES)
def test_a_trainer_that_streams_gets_the_same_groups_as_they_are_taken(mode, useless):
    whole, chunked = (kind(2, useless=useless, **MODES[mode]) for kind in (World, ChunkedWorld))
    chunks = 0
    for number in range(1, 31):
        (texts, metrics), (ours, own) = whole.step(number), chunked.step(number)
        assert ours == texts, "in the order in which they were taken"
        for name in ("long_round", "stopped_prompts", "waiting_prompts", "redraws", "mean_returned"):
            assert own[name] == metrics[name], name
        chunks += chunked.chunks
    assert chunks > 3 * 30 and chunked.tokens == whole.tokens


def test_a_group_without_any_response_is_left_out_of_its_chunk():
    world = ChunkedFailing(1, fails=lambda text: text == 1)
    texts, metrics = world.step(1)
    assert texts.count(None) == 1 and len(texts) == BATCH and metrics["failed_prompts"] == 1
    refills = {"sync_refill_failed_groups": True, "refill_fn": print, "gen_batch_size": 1}
    texts, metrics = ChunkedFailing(1, fails=lambda text: text == 1, named=refills).step(1)
    assert None not in texts and 1 not in texts and metrics["failed_prompts"] == 0


def test_a_step_says_how_many_responses_it_can_do_without():
    world = ChunkedWorld(0, look=1)
    world.begin(1)
    assert world.count_running() == 12 * RESPONSES and world.count_spare() == 4 * RESPONSES
    world.wait_for_sampleable(1, "train", BATCH // 2)
    running = world.count_running()
    assert len(world.under_way) == running and 0 < world.count_spare() < running
    world.wait_for_sampleable(1, "train", BATCH)
    assert world.count_spare() == world.count_running() - (world.count_running() > 0)
