"""Steps of streamed gradients under verl without engines: chunks, lent ranks, and what is refused."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module
from msgspec import structs
from transfer_queue import KVBatchMeta
from verl.utils import tensordict_utils

from sglang_pat.integrations.verl import stream_lent, streaming
from sglang_pat.integrations.verl.fields import STEPS, STOPPED, STOPS
from sglang_pat.integrations.verl.gradient_sums import Sums
from sglang_pat.integrations.verl.streaming import AdaptiveStream, StreamStep, check_samples
from sglang_pat.integrations.verl.tail_batching import NoResponseError
from sglang_pat.policies.lending import STRIDE, Move, Others, Training

from . import jobs
from .verl_stream_jobs import ENGINE, HYBRID, REF, ROLLOUT

pytestmark = pytest.mark.integration

LENT_MODE = f"trainer.v1.trainer_mode={stream_lent.MODE}"
OURS = f"{ROLLOUT}.engine_kwargs.sglang_pat"
GOOD = (
    f"trainer.v1.trainer_mode={streaming.MODE}", f"{ROLLOUT}.name=sglang_pat", f"{ROLLOUT}.nnodes=1",
    f"{ROLLOUT}.n_gpus_per_node=2", f"{ROLLOUT}.tensor_model_parallel_size=2", f"{ENGINE}.backend=nccl",
    f"+{OURS}={{}}", "actor_rollout_ref.actor.strategy=fsdp2",
    "data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8", "algorithm.adv_estimator=grpo",
)  # fmt: skip


def make_trainer(*others: str) -> AdaptiveStream:
    """The trainer as verl makes it, before anything is loaded."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        return AdaptiveStream(compose("ppo_trainer", [*GOOD, *others]))


def test_a_step_has_its_own_prompts_only():
    trainer = make_trainer()
    assert trainer.trainer_mode == "separate_async" and trainer.parameter_sync_step == 1
    assert trainer.config.trainer.v1.separate_async.num_warmup_batches == 0
    assert trainer.replay_buffer.max_off_policy_threshold is None and not trainer._hands_over
    assert make_trainer(HYBRID)._hands_over


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "+trainer.v1.sglang_pat_stream={chunk: 2}",
            "trainer.v1.sglang_pat_stream has no option 'chunk'; choose from ",
        ),
        ("actor_rollout_ref.actor.ppo_epochs=2", "actor_rollout_ref.actor.ppo_epochs is 2, must be 1 with trainer.v1."),
    ],
)
def test_refused_in_one_line(override, line):
    with pytest.raises(ValueError) as refused:
        make_trainer(override)
    assert str(refused.value).startswith(line) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("runs", "line"),
    [
        (((0, 4),), None),
        (((0, 4), (2, None), (3, 4)), None),  # a tool's token
        (((0, 4), (3, 5)), "token 3 of response uid_0_0 is of the weights of step 5, must be of step 4: "),
        (((0, 3), (1, 4)), "token 0 of response uid_0_0 is of the weights of step 3, must be of step 4: "),
        (((0, 4), (3, None)), "token 3 of response uid_0_0 is of the weights of step None, must be of step 4: "),
        ((), "token 0 of response uid_0_0 is of the weights of step None, must be of step 4: "),
    ],
)
def test_each_token_is_of_the_weights_of_its_step(monkeypatch, runs, line):
    mask = torch.nested.as_nested_tensor([torch.tensor([1, 1, 0, 1])], layout=torch.jagged)
    fields = SimpleNamespace(tolist=lambda: [{STEPS: runs}])
    monkeypatch.setattr(streaming.tq, "kv_batch_get", lambda **_: {"response_mask": mask, "extra_fields": fields})
    batch = KVBatchMeta(partition_id="train", keys=["uid_0_0"], tags=[{}])
    if line is None:
        return check_samples(batch, 4)
    with pytest.raises(RuntimeError) as refused:
        check_samples(batch, 4)
    assert str(refused.value).startswith(line) and "\n" not in str(refused.value)


def test_a_response_that_was_stopped_is_never_trained_on(monkeypatch):
    mask = torch.nested.as_nested_tensor([torch.tensor([1, 1])], layout=torch.jagged)
    for reason in ("abort", STOPPED):
        fields = SimpleNamespace(tolist=lambda reason=reason: [{STEPS: ((0, 4),), STOPS: ["stop", reason]}])
        data = {"response_mask": mask, "extra_fields": fields}
        monkeypatch.setattr(streaming.tq, "kv_batch_get", lambda data=data, **_: data)
        with pytest.raises(RuntimeError, match=r"^response uid_0_0 was stopped before its end, must be whole: "):
            check_samples(KVBatchMeta(partition_id="train", keys=["uid_0_0"], tags=[{}]), 4)


class World(StreamStep):
    """A step whose groups are complete as ``there`` says: how many are, each time that the trainer looks.

    Args:
        fails: chunks of which no response is there, by number.
    """

    def __init__(self, batch: int, there: list[int], fails: tuple[int, ...] = ()) -> None:
        self.fails, self.calls, self.noted = fails, list[str](), list[int]()
        update, looks = tensordict_utils.get_tensordict({}, {"metrics": {"mfu": 1.0}}), iter(there)
        gpus: Any = SimpleNamespace(
            ranks=range(1), left_at=None, begin_step=lambda: None, follow=lambda *_: None,
            note_chunk=lambda chunk, *_: self.noted.append(len(streaming.list_samples(chunk))),
        )  # fmt: skip
        trainer: Any = SimpleNamespace(
            config=SimpleNamespace(data=SimpleNamespace(train_batch_size=batch)), global_steps=5,
            prepare_step=lambda: self.calls.append("prompts") or {},
            actor_rollout_wg=SimpleNamespace(
                begin_step=lambda: self.calls.append("begin"),
                finish_step=lambda sequences: self.calls.append(f"finish {sequences}") or [update],
            ),
            replay_buffer=SimpleNamespace(
                wait_for_sampleable=lambda *_: (set(range(next(looks))), {}),
                get_sampleable_count=lambda *_: next(looks),
            ),
        )  # fmt: skip
        super().__init__(trainer, gpus)

    def train_chunk(self, groups: int, metrics: dict[str, Any], timing_raw: dict[str, float]) -> KVBatchMeta:
        self.calls.append(f"chunk {groups}")
        if len(self.calls) - 2 in self.fails:
            raise NoResponseError(0)
        metrics["rollout/tokens/tp1"] = 10 * groups
        tags = [{"response_len": 3} for _ in range(2 * groups)] + [{"is_padding": True, "response_len": 1}]
        return KVBatchMeta(partition_id="train", keys=[f"{len(self.calls)}_{i}" for i in range(len(tags))], tags=tags)


def test_a_step_is_one_update_of_chunks_of_whatever_is_complete():
    # Looks: before a chunk, and after it, when the rest may be there.
    world, metrics = World(8, [3, 1, 1, 0, 9, 5]), dict[str, Any]()
    batch = world.run(metrics, {})
    assert world.calls == ["prompts", "begin", "chunk 3", "chunk 1", "chunk 4", "finish 16"], "no more than the batch"
    assert len(batch.keys) == 16 + 3 and metrics["rollout/tokens/tp1"] == 80
    assert metrics["training/stream/chunks"] == 3 and world.noted == [6, 2, 8]
    assert metrics["training/stream/hidden_seconds"] > 0 and metrics["training/stream/exposed_seconds"] > 0


def test_a_step_lacks_the_groups_of_which_no_response_is_there():
    metrics: dict[str, Any] = {}
    world = World(8, [3, 1, 5, 9], fails=(2,))
    world.run(metrics, {})
    assert world.calls == ["prompts", "begin", "chunk 3", "chunk 5", "finish 6"]
    with pytest.raises(NoResponseError, match="^no response to train on: all 8 prompts of the step have failed"):
        World(8, [8], fails=(1,)).run(metrics, {})


def test_training_that_the_batch_waits_for_is_not_hidden():
    metrics: dict[str, Any] = {}
    World(8, [5, 3, 3, 0]).run(metrics, {})  # the rest is there when the first chunk is trained
    assert metrics["training/stream/chunks"] == 2 and metrics["training/stream/hidden_seconds"] == 0


@pytest.mark.parametrize(
    ("given", "alone", "passes"),
    [
        ("true", False, ["_compute_old_log_prob 4", "report_degrees", "_compute_ref_log_prob 4"]),
        ("false", False, ["_compute_ref_log_prob 4"]),
        ("false", True, []),
    ],
    ids=["compared with the engine's", "old log-probs come later", "on lent ranks"],
)
def test_a_chunk_goes_through_verls_own_methods(monkeypatch, given, alone, passes):
    calls: list[str] = []

    def go(name: str, batch: KVBatchMeta) -> KVBatchMeta:
        size = batch.extra_info.pop("micro_batch_size_per_gpu", None)
        calls.append(f"{name} {size}" if size else name)
        return batch

    for name in ("_balance_batch", "_compute_old_log_prob", "_compute_ref_log_prob", "_compute_advantage"):
        monkeypatch.setattr(streaming.PPOTrainer, name, lambda self, batch, metrics, name=name: go(name, batch))
    monkeypatch.setattr(streaming, "check_samples", lambda batch, version: calls.append(f"weights of {version}"))
    monkeypatch.setattr(streaming, "report_degrees", lambda config, batch, metrics: go("report_degrees", batch))
    sizes = [f"{part}.log_prob_micro_batch_size_per_gpu=4" for part in (ROLLOUT, REF)]
    trainer: Any = make_trainer(
        f"{ROLLOUT}.calculate_log_probs={given}", "actor_rollout_ref.actor.use_kl_loss=true", *sizes
    )
    batch = KVBatchMeta(partition_id="train", keys=[str(i) for i in range(16)], tags=[{}] * 16)
    trainer.replay_buffer.sample = lambda global_steps, partition_id, batch_size: (batch, {"evicted": batch_size})
    trainer.global_steps, trainer.current_mode = 5, streaming.HybridEngineMode.TRAINER
    trainer.note_moves = lambda batch: calls.append("moves")
    trainer.actor_rollout_wg = SimpleNamespace(world_size=2)
    step = StreamStep(trainer, trainer.gpus)
    step.gpus.train_alone, step.add_gradients = alone, lambda batch: go("gradients", batch)
    timing: dict[str, float] = {}
    assert step.train_chunk(3, {}, timing) is batch and step._evicted == {"evicted": 3}
    assert calls == ["weights of 4", "moves", "_balance_batch", *passes, "_compute_advantage", "gradients"]
    assert list(timing) == ["gen", "old_log_prob", "ref", "adv", "update_actor"]


def test_what_fills_a_batch_up_is_not_trained_on():
    step: Any = object.__new__(StreamStep)
    step.trainer = SimpleNamespace(actor_rollout_wg=SimpleNamespace(world_size=2))
    step.gpus = SimpleNamespace(ranks=range(2))
    padding = [False, False, True, True, False, True]
    batch = KVBatchMeta(
        partition_id="train", keys=list("abcdef"), tags=[{"is_padding": one} for one in padding], extra_info={"x": 1}
    )
    shares = step.divide(batch)
    assert [share and share.keys for share in shares] == [["a", "b"], ["e"]]
    assert all(share is not None and share.extra_info == {"x": 1} for share in shares)
    nothing = KVBatchMeta(partition_id="train", keys=["a", "b"], tags=[{}, {"is_padding": True}])
    assert step.divide(nothing)[1] is None


def test_a_rank_that_fails_ends_the_step(monkeypatch):
    """The others of its replica wait for it, for as long as a collective may take."""

    def get(futures):
        assert futures == ["failed"]
        raise MemoryError("out of memory")

    step: Any = object.__new__(StreamStep)
    step.divide, step.gpus = lambda batch: [None, None], SimpleNamespace(begin_chunk=lambda: None)
    step.buffer, step.look = SimpleNamespace(poll_interval=0.5), lambda **_: pytest.fail("it waits for the other")
    group = SimpleNamespace(add_gradients=lambda shares: ["failed", "waits"])
    step.trainer = SimpleNamespace(actor_rollout_wg=group)
    monkeypatch.setattr(streaming, "ray", SimpleNamespace(wait=lambda *_, **__: (["failed"], ["waits"]), get=get))
    with pytest.raises(MemoryError, match="out of memory"):
        step.try_gradients(KVBatchMeta(partition_id="train", keys=["a"], tags=[{}]))


@pytest.mark.parametrize(("ranks", "size", "engine"), [(2, 1, 2), (8, 4, 8), (8, 2, 8), (16, 4, 8), (8, 1, 4)])
def test_lent_ranks_are_whole_replicas_of_the_trainer(ranks, size, engine):
    lent = {rank for rank in range(ranks) if rank % engine % STRIDE}  # as docs/lending.md says
    replicas = stream_lent.list_replicas(ranks, size, engine)
    assert sorted(sum(replicas, [])) == list(range(ranks)) and {len(replica) for replica in replicas} == {size}
    assert all(lent.issuperset(replica) or lent.isdisjoint(replica) for replica in replicas)
    assert all(len({rank // engine for rank in replica}) == 1 for replica in replicas), "of one node"


GROUPS = 8
PROFILE = jobs.ROOT / "studies" / "profiles" / "8xH100-qwen2.5-32b-pat-costs.json"


class LendingEngine:
    """The actor of an engine of two ranks."""

    def __init__(self, calls: list[Any], lent: list[int], says: dict[int, Move]) -> None:
        self.lend_ranks = SimpleNamespace(remote=lambda stride: calls.append(stride) or (lent if stride > 1 else []))
        self.running = 0
        self.load = SimpleNamespace(
            remote=lambda: SimpleNamespace(kv_free=1000, tokens=200, running=self.running, waiting=1)
        )
        self.decide_lending = SimpleNamespace(remote=self.decide)
        self.says, self.asked = says, list[Training]()

    def decide(self, training: Training) -> Move:
        self.asked.append(training)
        return self.says.get(training.complete, Move.WAIT)


def make_lending_trainer(monkeypatch, calls, engines, looks, policy) -> stream_lent.AdaptiveStreamLent:
    """A trainer whose steps have eight groups of two responses; complete groups are as ``looks`` says, one after the
    other."""

    def wait(_: int, partition: str, least: int) -> tuple[set[str], dict[str, Any]]:
        assert (partition, least) == ("train", 0)
        return {str(group) for group in range(trainer.stream.batch - trainer.stream.left, next(looks))}, {}

    monkeypatch.setattr(stream_lent.ray, "get", lambda found: found)
    overrides = [
        *GOOD, f"trainer.v1.trainer_mode={stream_lent.MODE}", *LENT, f"{ROLLOUT}.n=2", "data.max_response_length=50",
        f"+{OURS}.policy={policy}",
    ]  # fmt: skip
    if policy == "survival":
        overrides.append(f"+{OURS}.profile={PROFILE}")
    with initialize_config_module("verl.trainer.config", version_base=None):
        trainer: Any = stream_lent.AdaptiveStreamLent(compose("ppo_trainer", overrides))
    trainer.timing_raw, trainer.global_steps, trainer.curr_step_profile = {}, 1, False
    trainer.engines.list_actors = lambda: engines
    tags = {
        f"{group}_{i}_0": {"prompt_len": 10, "response_len": 5, "global_steps": 1} for group in range(8) for i in (0, 1)
    }
    trainer.replay_buffer = SimpleNamespace(
        wait_for_sampleable=wait, partitions={"train": tags}, running_keys={"train": {"7"}},
        _wait_for_next_poll=lambda partition, last: last, poll_interval=0.5, filter_groups_metric=None,
    )  # fmt: skip
    trainer.actor_rollout_wg = SimpleNamespace(world_size=4, empty_cache=lambda: calls.append("memory"))
    trainer.gpus.bell = SimpleNamespace(set=SimpleNamespace(remote=lambda rung: calls.append(f"bell {rung}")))
    awake = trainer.awake = [1]
    trainer.checkpoint_manager = SimpleNamespace(
        abort_replicas=lambda: calls.append("abort"), sleep_replicas=lambda: calls.append("sleep"),
        leave_round=lambda number: calls.append(f"leave {number}"), count_awake=lambda: awake[0],
        update_weights=lambda: calls.append("weights"), resume_generation_replicas=lambda: calls.append("resume"),
    )  # fmt: skip
    return trainer


def play_ranks(monkeypatch, trainer: Any, rows: list[list[list[int]]], done: list[int]) -> list[list[list[str]]]:
    """Training ends with ``rows`` on each rank, by call; ``done`` ranks are over at each look.  Returns what each rank
    is given, by call."""
    shares, rows_of_calls, looks = [], iter(rows), iter(done)

    def add_gradients(given: list[KVBatchMeta | None]) -> list[Sums]:
        shares.append([share.keys if share else [] for share in given])
        return [Sums(rows=rows) for rows in next(rows_of_calls)]

    trainer.actor_rollout_wg.add_gradients = add_gradients
    monkeypatch.setattr(stream_lent.ray, "wait", lambda futures, **_: (futures[: next(looks)], []))
    return shares


def begin_step(trainer: Any) -> StreamStep:
    trainer.stream = StreamStep(trainer, trainer.gpus)
    return trainer.stream


@pytest.mark.parametrize(("lent", "chunks"), [([1], [2, 3, 3]), ([], [8])])
def test_lent_ranks_train_until_the_batch_is_complete(monkeypatch, lent, chunks):
    """Two engines, and no profile; ``[]``: the switch was aborted, and nothing is trained before all is complete."""
    calls: list[Any] = []
    engines = [LendingEngine(calls, lent, {2: Move.LEND}) for _ in range(2)]
    trainer: Any = make_lending_trainer(monkeypatch, calls, engines, iter([1, 2, 5, 5, 8]), "threshold")
    step = begin_step(trainer)
    for groups in chunks:
        assert step.wait_for_groups() == groups
        step.left -= groups
        if step.left:
            assert step.gpus.ranks == [1, 3]
    assert list(step.gpus.ranks) == [0, 1, 2, 3] and step.gpus.left_at == 0.25
    assert calls == [2, 2, "memory", 1, 1, "abort", "sleep"]


def test_a_chunk_that_is_trained_does_not_hold_a_batch_that_is_complete(monkeypatch):
    """Two of four ranks train a chunk of six samples.  Then all groups are there: they end, all ranks do the rest."""
    calls: list[Any] = []
    engines = [LendingEngine(calls, [1], {3: Move.LEND}) for _ in range(2)]
    trainer: Any = make_lending_trainer(monkeypatch, calls, engines, iter([3, 5, 8, 8, 8]), "threshold")
    step = begin_step(trainer)
    assert step.wait_for_groups() == 3
    step.left = 5
    del calls[:]
    batch = KVBatchMeta(
        partition_id="train", keys=list("abcdefgh"), extra_info={"x": 1},
        tags=[{"seq_len": length, "is_padding": length == 1} for length in (9, 1, 5, 4, 3, 8, 7, 1)],
    )  # fmt: skip
    shares = play_ranks(monkeypatch, trainer, [[[], [0], [], [1, 2]], [[0], [0], [0], []]], [0, 0, 4, 4])
    step.add_gradients(batch)
    assert shares == [[[], ["a", "c", "d"], [], ["e", "f", "g"]], [["c"], ["d"], ["e"], []]]
    assert calls == ["bell True", "memory", 1, 1, "abort", "sleep", "bell False"], "rung when all eight are there"
    assert step.wait_for_groups() == 5 and step.gpus.left_at == 3 / 8 and calls[-1] == "bell False"


def test_the_engine_with_the_fewest_requests_may_leave(monkeypatch):
    """The first engine lends, the second leaves: it has fewer requests.  The first is then the last one awake."""
    calls: list[Any] = []
    engines = [
        LendingEngine(calls, [1], {2: Move.LEND}),
        LendingEngine(calls, [1], {2: Move.LEND, 5: Move.LEAVE, 6: Move.LEAVE}),
    ]
    engines[0].running = 5
    trainer: Any = make_lending_trainer(monkeypatch, calls, engines, iter([2, 5, 6, 8]), "threshold")
    trainer.gpus._pace.lend = lambda now: calls.append("pace")
    step = begin_step(trainer)
    assert step.wait_for_groups() == 2 and list(step.gpus.ranks) == [1, 3]
    step.left = 6
    assert step.wait_for_groups() == 3 and list(step.gpus.ranks) == [1, 2, 3], "all of the second engine"
    step.left = 3
    assert step.wait_for_groups() == 1 and list(step.gpus.ranks) == [1, 2, 3]
    step.left = 2
    assert step.wait_for_groups() == 2 and list(step.gpus.ranks) == [0, 1, 2, 3]
    assert calls == [2, 2, "pace", "memory", 1, "leave 1", "memory", 1, "abort", "sleep"]
    told = [training.others for training in engines[1].asked]
    about = Others(engines=1, running=5, waiting=1, tokens=200, room=1200, delay=1.0)
    assert told == [about, structs.replace(about, lent=0.5)]
    assert [training.others for training in engines[0].asked] == [None] * 3
    assert [training.slowdown for training in engines[0].asked] == [2, 2, pytest.approx(4 / 3)], "with three of four"


def test_an_engine_that_left_goes_on_if_all_others_die(monkeypatch):
    """Deaths while ranks wait for groups, and while they train."""
    calls: list[Any] = []
    engines = [LendingEngine(calls, [1], {}), LendingEngine(calls, [1], {5: Move.LEAVE, 6: Move.LEAVE})]
    engines[0].running = 5
    for looks, trains in (([5, 6, 8], False), ([5, 6, 6, 8], True)):
        del calls[:]
        trainer: Any = make_lending_trainer(monkeypatch, calls, engines, iter(looks), "threshold")
        step = begin_step(trainer)
        assert step.wait_for_groups() == 5 and list(step.gpus.ranks) == [2, 3]
        step.left, trainer.awake[0] = 3, 0
        if trains:
            step.look(is_training=True)
            assert calls == ["leave 1", "bell True"] and list(step.gpus.ranks) == [2, 3]
            del calls[1:]
        step.look()
        assert calls == ["leave 1", "memory", "weights", "resume"] and not step.gpus.ranks
        trainer.awake[0] = 2
        assert step.wait_for_groups() == 3 and len(step.gpus.ranks) == 4
        assert calls[4:] == ["memory", 1, 1, "abort", "sleep"], "the end is that of any step"


def test_a_chunk_is_interrupted_for_an_engine_that_leaves(monkeypatch):
    calls: list[Any] = []
    engines = [LendingEngine(calls, [1], {3: Move.LEND}), LendingEngine(calls, [1], {5: Move.LEAVE})]
    engines[0].running = 5
    trainer: Any = make_lending_trainer(monkeypatch, calls, engines, iter([3, 5, 5, 8]), "threshold")
    step = begin_step(trainer)
    assert step.wait_for_groups() == 3 and list(step.gpus.ranks) == [1]
    step.left = 5
    del calls[:]
    batch = KVBatchMeta(partition_id="train", keys=list("abc"), tags=[{"seq_len": n} for n in (3, 2, 1)])
    shares = play_ranks(monkeypatch, trainer, [[[], [0], [], []], [[], [0], [0], []]], [0, 4, 4])
    looks = iter([2, 2])
    trainer.replay_buffer.wait_for_sampleable = lambda *_: ({str(3 + i) for i in range(next(looks))}, {})
    step.add_gradients(batch)
    assert shares == [[[], ["a", "b", "c"], [], []], [[], ["b"], ["c"], []]]
    assert calls == ["bell True", "leave 1", "bell False"]
    assert [training.slowdown for training in engines[0].asked] == [2, 4, 4], "one of four ranks trains"


def test_ranks_that_train_are_taken_back_when_the_engine_says_so(monkeypatch):
    """The middle of a chunk; what is left of it waits for the end of the round."""
    calls: list[Any] = []
    engine = LendingEngine(calls, [1], {6: Move.LEND, 8: Move.TAKE_BACK})
    trainer: Any = make_lending_trainer(monkeypatch, calls, [engine], iter([3, 4, 4, 6, 8, 8]), "survival")
    begin_step(trainer)
    trainer.gpus._pace.add(4.0, 200, lent=False)
    step = begin_step(trainer)
    assert step.wait_for_groups() == 3 and step.gpus.ranks == [1]
    step.left = 5
    del calls[:]
    batch = KVBatchMeta(partition_id="train", keys=list("abc"), tags=[{"seq_len": n} for n in (3, 2, 1)])
    shares = play_ranks(monkeypatch, trainer, [[[], [0], [], []], [[0], [0], [], []]], [0, 4, 4])
    step.add_gradients(batch)
    assert shares == [[[], ["a", "b", "c"], [], []], [["b"], ["c"], [], []]]
    assert calls == ["bell True", "memory", 1, "memory", 1, "abort", "sleep", "bell False"]
    assert step.wait_for_groups() == 5 and step.gpus.left_at == 3 / 8


def test_all_ranks_train_when_nothing_is_generated_any_more(monkeypatch):
    """Rewards of five groups are not there yet."""
    calls: list[Any] = []
    trainer: Any = make_lending_trainer(
        monkeypatch, calls, [LendingEngine(calls, [1], {})], iter([1, 3, 8]), "survival"
    )
    monkeypatch.setattr(StreamStep, "is_generated", lambda self: self.left < GROUPS)
    step = begin_step(trainer)
    step.left = 7
    assert step.wait_for_groups() == 2 and step.gpus.ranks == range(4)
    step.left = 5
    assert step.wait_for_groups() == 5 and step.gpus.left_at == 1.0
    assert calls == ["memory", 1, "abort", "sleep"]


@pytest.mark.parametrize(
    ("looks", "running", "moved"),
    [([1, 2, 3], [40, 40, 16], 3 / 8), ([0, 7, 7, 8], [4], 7 / 8), ([0, 7, 8], [40], 1.0), ([8], [], 1.0)],
    ids=["as soon as KV fits", "late, and a long rest", "it never fits", "too late"],
)
def test_the_trainers_gpus_leave_a_round_when_the_others_have_room(monkeypatch, looks, running, moved):
    """Eight groups of two.  Those that run are at 10 of 50 tokens; the engines that stay have room for 1200."""
    counts, groups, calls = iter(running), iter(looks), list[str]()

    def make_engine(room: int) -> SimpleNamespace:
        def report() -> SimpleNamespace:
            count = next(counts)
            return SimpleNamespace(running=count, waiting=0, tokens=20 * count, kv_free=room - 20 * count)

        return SimpleNamespace(load=SimpleNamespace(remote=report))

    monkeypatch.setattr(streaming.ray, "get", lambda found: found)
    trainer: Any = make_trainer(f"{ROLLOUT}.n=2", "data.max_response_length=50", HYBRID)
    trainer.timing_raw, trainer.global_steps, trainer.actor_rollout_wg = {}, 1, SimpleNamespace(world_size=2)
    for _ in range(100):
        trainer.gpus._lengths.observe(50, 0)
    trainer.current_mode = streaming.HybridEngineMode.ROLLOUT
    trainer.switch_to_trainer = lambda: calls.append("moved")
    trainer.standalone_server_manager = SimpleNamespace(server_handles=[make_engine(1200)])
    trainer.llm_server_manager = SimpleNamespace(server_handles=[])
    tags = {f"{group}_{i}_0": {"prompt_len": 10, "response_len": 40} for group in range(8) for i in (0, 1)}
    trainer.replay_buffer = SimpleNamespace(
        wait_for_sampleable=lambda *_: ({str(group) for group in range(next(groups))}, {}),
        partitions={"train": tags}, _wait_for_next_poll=lambda partition, last: last,
    )  # fmt: skip
    trainer.stream = StreamStep(trainer, trainer.gpus)
    assert not trainer.gpus.ranks
    assert trainer._wait_for_sampleable_and_switch() == {} and calls == ["moved"]
    assert trainer.gpus.left_at == moved and trainer.gpus.ranks == range(2)


def test_a_chunk_has_a_fifth_of_what_is_left():
    left, chunks = 32, list[int]()
    while left:
        chunks.append(streaming.count_least(left))
        left -= chunks[-1]
    assert chunks == [6, 5, 4, 3, 2, 2, 2, *[1] * 8]


def test_with_a_profile_the_engine_says_when_ranks_are_lent_and_taken_back(monkeypatch):
    calls: list[Any] = []
    engine = LendingEngine(calls, [1], {6: Move.LEND, 10: Move.TAKE_BACK})
    looks = iter([2, 8, 2, 2, 3, 4, 5, 5, 6, 8])
    trainer: Any = make_lending_trainer(monkeypatch, calls, [engine], looks, "survival")
    engine.says = {}
    step = begin_step(trainer)
    assert step.wait_for_groups() == GROUPS and step.gpus.left_at == 1.0
    assert {training.seconds_per_token for training in engine.asked} == {0.0}, "the first step is measured"
    trainer.gpus._pace.add(4.0, 200, lent=False)
    engine.says = {6: Move.LEND, 10: Move.TAKE_BACK}
    del calls[:], engine.asked[:]
    step = begin_step(trainer)
    assert step.wait_for_groups() == 3 and calls == [2], "asked with 2 complete, once"
    step.left = 5
    assert step.wait_for_groups() == 1
    step.left = 4
    assert step.wait_for_groups() == 4 and step.gpus.left_at == 3 / 8
    assert calls == [2, "memory", 1, "memory", 1, "abort", "sleep"], "taken back with 5 complete"
    assert [training.complete for training in engine.asked] == [4, 6, 8, 10], "and then no more"
    told = [structs.replace(training, elapsed=0.0, lent=0.0) for training in engine.asked]
    assert told[0] == Training(samples=16, complete=4, ready=60, pending=30, seconds_per_token=0.02)
    assert told[3].ready == 30
    assert [training.lent > 0 for training in engine.asked] == [False, False, True, True]
    elapsed = [training.elapsed for training in engine.asked]
    assert elapsed == sorted(elapsed) and elapsed[0] >= 0


def test_there_may_be_more_engines_than_samples(monkeypatch):
    calls: list[Any] = []
    engines = [LendingEngine(calls, [1], {}) for _ in range(2 * GROUPS + 1)]
    trainer: Any = make_lending_trainer(monkeypatch, calls, engines, iter([1, 8]), "threshold")
    assert begin_step(trainer).wait_for_groups() == GROUPS
    asked = [engine.asked[0] for engine in engines]
    assert {(training.samples, training.completion) for training in asked} == {(1, 0.0)}


LENT = (
    f"{ROLLOUT}.nnodes=0", f"{ROLLOUT}.calculate_log_probs=false", "actor_rollout_ref.actor.fsdp_config.fsdp_size=1",
    "actor_rollout_ref.actor.use_kl_loss=true", f"{REF}.fsdp_config.fsdp_size=1",
)  # fmt: skip


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.nnodes is 1, must be 0 with {LENT_MODE}: the engines have the"),
        (f"{ROLLOUT}.calculate_log_probs=true", f"{ROLLOUT}.calculate_log_probs is true, must be false with"),
        (f"{REF}.fsdp_config.fsdp_size=-1", f"{REF}.fsdp_config.fsdp_size is -1, must be 1 with {LENT_MODE} and "),
        (f"{REF}.ulysses_sequence_parallel_size=2", f"{REF}.ulysses_sequence_parallel_size is 2, must be 1 with"),
        (f"{REF}.strategy=fsdp", f"{REF}.strategy is fsdp, must be fsdp2 with {LENT_MODE} and use_kl_loss: a rep"),
        ("reward.reward_model.enable=true", "reward.reward_model.enable_resource_pool is false, must be true with"),
        (
            "actor_rollout_ref.model={lora_rank: 8, lora: {merge: true}}",
            f"actor_rollout_ref.model.lora_rank is 8, must be left out with {LENT_MODE} and use_kl_loss: ",
        ),
        (f"{ROLLOUT}.tensor_model_parallel_size=1", f"{ROLLOUT}.tensor_model_parallel_size is 1, must be even with"),
        (
            "actor_rollout_ref.actor.fsdp_config.fsdp_size=-1",
            "actor_rollout_ref.actor.fsdp_config.fsdp_size is -1, must be 1 or a divisor of it (half of "
            f"{ROLLOUT}.tensor_model_parallel_size) with {LENT_MODE}: ",
        ),
        (f"+{OURS}.weights=reshard", f"{OURS}.weights is reshard, must be resident with {LENT_MODE}: "),
        (f"+{OURS}.gpu_order=neighbours", f"{OURS}.gpu_order is neighbours, must be rank with {LENT_MODE}: "),
        (f"+{OURS}.base_tp=2", f"{OURS}.candidates is [2], must be degrees with 1 and 2 among them with"),
        (f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.name is sglang, must be sglang_pat with {LENT_MODE}: "),
    ],
)
def test_what_keeps_ranks_from_being_lent_is_refused_in_one_line(override, line):
    overrides = [*GOOD, f"trainer.v1.trainer_mode={stream_lent.MODE}", *LENT]
    with initialize_config_module("verl.trainer.config", version_base=None):
        trainer = stream_lent.AdaptiveStreamLent(compose("ppo_trainer", overrides))
        assert trainer.trainer_mode == "colocate_async" and not trainer.gpus.ranks
        with pytest.raises(ValueError) as refused:
            stream_lent.AdaptiveStreamLent(compose("ppo_trainer", [*overrides, override]))
    assert str(refused.value).startswith(line) and "\n" not in str(refused.value)


def test_an_engine_that_leaves_the_round_sends_requests_away():
    from sglang_pat.integrations.verl.replica import AdaptiveReplica, AdaptiveServer

    server, calls = object.__new__(AdaptiveServer), list[str]()
    server.rollout_mode = None

    def make_remote(name: str, method: Any) -> SimpleNamespace:
        async def call(*args: Any) -> None:
            calls.append(name)
            await method(*args)

        return SimpleNamespace(remote=call)

    replica = object.__new__(AdaptiveReplica)
    nothing = asyncio.sleep
    replica.servers = [
        SimpleNamespace(
            refuse_requests=make_remote("refuse", server.refuse_requests),
            abort_all_requests=make_remote("abort", lambda: nothing(0)),
            resume_generation=make_remote("resume", lambda: nothing(0)),
        )
    ]

    async def run() -> Any:
        await replica.abort_all_requests()
        assert not server._refuses, "they go on here after an update of the weights"
        await replica.abort_all_requests(reject_request=True)
        answer = await server.generate([1, 2], {}, "request")
        await replica.resume_generation()
        return answer

    answer = asyncio.run(run())
    assert calls == ["abort", "refuse", "abort", "resume", "refuse"], "none slips in between"
    assert answer.stop_reason == "aborted" and answer.token_ids == [] and "global_steps" not in answer.extra_fields
    assert not server._refuses
