"""The replay buffer of tail batching, without engines: prompts end when a drawn number of polls is over."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from verl.utils import tensordict_utils

from sglang_pat.integrations.verl import tail_batching
from sglang_pat.integrations.verl.tail_batching import TailBatchingBuffer

pytestmark = pytest.mark.integration


class World(TailBatchingBuffer):
    """verl's workers and its queue: a prompt is under way for ``polls[uid]`` polls, or until all are stopped."""

    def __init__(self, num_prompts: int, seed: int, lingering: int = 0) -> None:
        super().__init__(
            tail_batching.rules({"tail_batching": "strict", "eta_prompts": 1.5, "max_deferrals": 4}, num_prompts),
            self.submitted, self.stopped, trainer_mode="sync", trainer_config={}, max_off_policy_threshold=None,
            max_off_policy_strategy="drop", sampler_kwargs={},
        )  # fmt: skip
        self.rng, self.lingering = random.Random(seed), lingering
        self.left: dict[str, int] = {}
        self.ended: set[str] = set()
        self.started: list[list[str]] = []
        self.fetched = self.stops = 0

    def fetch(self):
        uids = [f"u{self.fetched + i}" for i in range(4)]
        self.fetched += 4
        return tensordict_utils.get_tensordict({"uid": np.array(uids, dtype=object), "raw_prompt": list("abcd")})

    def submitted(self, rows) -> None:
        uids = [tail_batching._uid(row) for row in rows]
        assert not set(uids) & (self.left.keys() | self.ended), "it is out of the queue before it starts again"
        self.started.append(uids)
        for uid in uids:
            self.left[uid] = 40 if self.rng.random() < 0.2 else self.rng.randint(1, 6)

    def stopped(self) -> None:
        self.stops += 1
        if self.stops > self.lingering:  # agents may begin another turn
            self.ended |= self.left.keys()
            self.left.clear()

    def _sync_metadata_from_transfer_queue(self) -> None:
        self.finished_keys["train"] = set(self.ended)
        self.partitions["train"] = {f"{uid}_0_0": {"status": "success"} for uid in self.ended}

    def _wait_for_next_poll(self, partition_id, last):
        self.left = {uid: polls - 1 for uid, polls in self.left.items()}
        done = {uid for uid, polls in self.left.items() if polls <= 0}
        self.ended |= done
        self.left = {uid: polls for uid, polls in self.left.items() if uid not in done}
        return last

    def _clear_groups(self, partition_id, uids) -> None:
        self.ended -= uids

    def _materialize_batch(self, partition_id, selected_prompt_uids, partition_snapshot):
        assert set(selected_prompt_uids) == self.ended, "what is left in the queue is the batch"
        self.ended.clear()
        return SimpleNamespace(uids=list(selected_prompt_uids))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("lingering", [0, 3])
def test_each_prompt_is_trained_on_once_and_none_waits_for_ever(seed, lingering):
    world, trained, long_rounds = World(8, seed, lingering), [], 0
    for step in range(1, 41):
        world.stops = 0
        world.begin(step, world.fetch)
        batch, metrics = world.sample(step, "train", 8)
        assert len(batch.uids) == len(set(batch.uids)) == 8
        trained += batch.uids
        long_rounds += metrics["training/tail_batching/long_round"]
        assert metrics["training/tail_batching/oldest_waiting"] <= 4
        assert not world.left and not world._under_way, "nothing of the step goes on"
    assert len(trained) == len(set(trained)) == 320
    begun = {uid for uids in world.started for uid in uids}
    assert len(begun - set(trained)) == metrics["training/tail_batching/waiting_prompts"] <= 4 * 8
    assert long_rounds >= 2


def test_a_checkpoint_keeps_the_prompts_that_wait(tmp_path):
    """The future after step 7 is the same for the process that goes on and for one that begins there."""
    world = World(8, seed=3)
    for step in range(1, 8):
        world.begin(step, world.fetch)
        world.sample(step, "train", 8)
    torch.save(world.state(), tmp_path / "state.pt")
    other = World(8, seed=3)
    other.rng.setstate(world.rng.getstate())
    other.fetched = world.fetched
    other.restore(torch.load(tmp_path / "state.pt", weights_only=False), "state.pt")
    assert other._rows.keys() == world._rows.keys() != set()

    def future(one: World) -> list[list[str]]:
        found = []
        for step in range(8, 20):
            one.stops = 0
            one.begin(step, one.fetch)
            found.append(one.sample(step, "train", 8)[0].uids)
        return found

    assert future(other) == future(world)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"tail_baching": "strict"}, "trainer.v1.sglang_pat_sync has no option 'tail_baching'; choose from"),
        ({"tail_batching": "partial"}, "trainer.v1.sglang_pat_sync.tail_batching is 'partial', must be strict or off"),
        ({"tail_batching": "strict", "eta_prompts": 0.5}, "trainer.v1.sglang_pat_sync.eta_prompts is 0.5, must be"),
    ],
)
def test_refused_in_one_line(options, line):
    with pytest.raises(ValueError) as refused:
        tail_batching.rules(options, 8)
    assert str(refused.value).startswith(line) and "\n" not in str(refused.value)


def test_off_by_default():
    assert tail_batching.rules({}, 8) is None and tail_batching.rules({"tail_batching": "off"}, 8) is None
