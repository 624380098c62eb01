"""A running judge looks at its memory between batches: when it does, and what it does then."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from sglang_pat.host import adapter
from stream_layers.judge_memory import order_layers
from stream_layers.residency import STEPS

pytestmark = pytest.mark.contract

LAYERS = 7
KEPT = 1 << 20


class World:
    """A judge of :data:`LAYERS` layers that starts with ``start`` of them streamed, and what it finds free."""

    def __init__(self, start: int, monkeypatch: pytest.MonkeyPatch) -> None:
        from stream_layers import follow
        from stream_layers.layers import StreamedLayers

        self.free = KEPT
        monkeypatch.setattr(follow, "read_available_memory", lambda: self.free)
        self.streamed = StreamedLayers(order_layers(start, LAYERS), start, "cpu")
        self.streamed.wrap_modules(torch.nn.Linear(64, 64, bias=False) for _ in range(LAYERS))
        self.streamed.post_init()
        self.graphs = Mock(seq_len_fill_value=1)
        self.runner = SimpleNamespace(device="cpu", **{adapter.rank.GRAPHS: self.graphs})
        self.follower = follow.Follower(self.runner, self.streamed, None)
        self.every = follow.EVERY

    def lack(self, layers: int) -> None:
        """Others take the room of so many layers."""
        self.free = KEPT - layers * self.streamed.layer_bytes

    def turn(self, busy: bool, times: int = 1) -> int:
        """Turn the loop so many times; returns how many layers are streamed then."""
        for _ in range(times):
            self.follower.turn(busy)
        return self.streamed.count


@pytest.fixture
def world(monkeypatch):
    return lambda start: World(start, monkeypatch)


ALL_ROOM = KEPT // (64 * 64 * 4)
"""The number of layers that fit into the memory that is kept."""


def test_an_idle_judge_looks_in_each_turn(world, caplog):
    caplog.set_level(logging.INFO)
    judge = world(3)
    assert judge.turn(busy=False) == 3
    judge.lack(ALL_ROOM)
    assert judge.turn(busy=False) == LAYERS
    judge.graphs.capture.assert_called_once_with()
    assert "0 layers are resident (before: 4): 0.00 GiB of the memory were free" in caplog.text
    assert judge.turn(busy=False) == LAYERS
    judge.graphs.capture.assert_called_once_with()


def test_a_busy_judge_looks_now_and_then_and_takes_back_what_it_started_with(world):
    judge = world(3)
    judge.lack(ALL_ROOM)
    assert judge.turn(busy=True, times=judge.every - 1) == 3
    assert judge.turn(busy=True) == LAYERS
    judge.free = 2 * KEPT
    judge.streamed.copy_seconds = 1.0  # so that its steps wait for copies
    assert judge.turn(busy=True, times=STEPS - 1) == LAYERS, "they do in so many steps"
    assert judge.turn(busy=True, times=judge.every) == 3


def test_times_without_a_batch_are_not_steps(world):
    judge = world(3)
    judge.lack(ALL_ROOM)
    judge.turn(busy=False)
    judge.free = 2 * KEPT
    judge.streamed.copy_seconds = 1.0
    assert judge.turn(busy=False, times=2 * STEPS) == LAYERS


def test_a_capture_writes_no_kv_but_in_the_slot_for_padding(world):
    """The buffers of the capture have the last step's slots in them, which are still in use."""
    judge = world(3)
    names = ("input_ids", "positions", "req_pool_indices", "out_cache_loc", "seq_lens", "seq_lens_cpu")
    judge.graphs.buffers = SimpleNamespace(**{name: torch.full((4,), 9) for name in names})
    judge.lack(ALL_ROOM)
    judge.turn(busy=False)
    assert {name: getattr(judge.graphs.buffers, name).unique().item() for name in names} == {
        **dict.fromkeys(names, 0), "seq_lens": 1, "seq_lens_cpu": 1,
    }  # fmt: skip


def test_ranks_stream_as_many_as_the_one_that_has_to_stream_most(world, monkeypatch):
    """Another rank wants five layers first; then it has no room, and stays with six."""
    judge = world(3)
    judge.follower._group = "both ranks"
    others = iter([5, 6])
    monkeypatch.setattr(
        torch.distributed, "all_reduce", lambda count, op, group: count.fill_(max(int(count), next(others)))
    )
    assert judge.turn(busy=False) == 6
    judge.graphs.capture.assert_called_once_with()


@pytest.mark.parametrize(
    "setting,given,follows",
    [("auto", {}, True), ("5", {}, False), ("auto", {"enable_memory_saver": True}, False),
     ("auto", {"enable_dp_attention": True}, False)],
)  # fmt: skip
def test_who_follows_its_memory(world, monkeypatch, setting, given, follows):
    from sglang.srt.utils import offloader

    from stream_layers import attach

    judge = world(3)
    monkeypatch.setenv("SGLANG_PAT_STREAM_LAYERS", setting)
    monkeypatch.setattr(offloader, "_instance", judge.streamed)
    args = SimpleNamespace(**{"enable_memory_saver": False, "enable_dp_attention": False} | given)
    worker = SimpleNamespace(model_runner=judge.runner)
    monkeypatch.setattr(adapter.streaming, "read_engine", lambda: args)
    scheduler = SimpleNamespace(tp_size=1, tp_worker=worker)
    assert (attach.make_follower(scheduler) is not None) == follows
