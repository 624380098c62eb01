"""Options of tail batching under verl, and what is refused."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from sglang_pat.integrations.verl import options, trainers
from sglang_pat.integrations.verl.tail_batching import TailBatchingBuffer

from .test_verl_tail_batching import BATCH, LIMIT, RESPONSES, SAMPLER, SIZES, STRICT, WHERE

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"tail_baching": "strict"}, "trainer.v1.sglang_pat_sync has no option 'tail_baching'; choose from"),
        (
            {"eta_prompts": 1.5},
            "trainer.v1.sglang_pat_sync.eta_prompts is given and tail_batching is not, must be strict",
        ),
        ({"tail_batching": "all"}, "trainer.v1.sglang_pat_sync.tail_batching is 'all', must be strict, reorder or off"),
        (
            {"tail_batching": "partial"},
            "trainer.v1.sglang_pat_sync.tail_batching is 'partial', must be strict, reorder or off: verl starts ",
        ),
        ({"tail_batching": "strict", "eta_prompts": 0.5}, "trainer.v1.sglang_pat_sync.eta_prompts is 0.5, must be"),
        (
            {"tail_batching": "reorder", "unbiased": True},
            "trainer.v1.sglang_pat_sync.unbiased is for mode strict, not reorder",
        ),
        ({"tail_batching": "strict", "unbiased": "no"}, "trainer.v1.sglang_pat_sync.unbiased is 'no', must be true or"),
        ({"tail_batching": "strict", "max_deferrals": None}, "trainer.v1.sglang_pat_sync.max_deferrals is None, must"),
        ({"tail_batching": "strict", "eta_prompts": "1.5x"}, "trainer.v1.sglang_pat_sync.eta_prompts is '1.5x', mus"),
    ],
)
def test_refused_in_one_line(given, line):
    with pytest.raises(ValueError) as refused:
        options.make_tail_batching_rules(given, WHERE, **SIZES)
    assert str(refused.value).startswith(line) and "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", [trainers.AdaptiveColocateAsync, trainers.AdaptiveSeparateAsync])
def test_other_trainer_modes_have_no_tail_batching(kind):
    name = "sglang_pat_colocate_async"
    config = OmegaConf.create({"trainer": {"v1": {"trainer_mode": name, name: {"tail_batching": "partial"}}}})
    with pytest.raises(ValueError, match=rf"^trainer\.v1\.{name} has no option 'tail_batching', must be left out"):
        kind(config)


CONFIG = {
    "actor_rollout_ref": {"rollout": {"n": RESPONSES, "response_length": LIMIT, "multi_turn": {"enable": False}}},
    "algorithm": {},
    "data": {"train_batch_size": BATCH},
    "reward": {"reward_model": {"enable": False}},
    "trainer": {"v1": {"sampler": SAMPLER, "sglang_pat_sync": STRICT}},
}
SAMPLERS = "trainer.v1.sampler"
DAPO = "algorithm.filter_groups={enable: true, metric: reward"
TURNS = "actor_rollout_ref.rollout.multi_turn.enable=true"


def made(*others: str):
    trainer = object.__new__(trainers.AdaptiveSync)
    trainer.trainer_mode, trainer.engines = "sync", trainers.Engines(trainer)
    trainer.config = OmegaConf.create(CONFIG)
    trainer.config.merge_with_dotlist(list(others))
    return trainer._build_replay_buffer()


def test_accepted():
    for others in ([], [TURNS], ["trainer.v1.sync.parameter_sync_step=1"]):
        assert isinstance(made(*others), TailBatchingBuffer) and not made(*others)._admitter.rules.filter_groups


def test_verls_filters_are_those_of_tail_batching():
    dapo = made(f"{DAPO}, max_num_gen_batches: 3, max_inflight_gen_batches: 1}}")
    assert dapo._admitter.rules.filter_groups and dapo.filter_groups_metric == "reward"
    assert dapo._most_judged == 3 * BATCH
    refills = made(f"{SAMPLERS}.sync_refill_failed_groups=true")
    assert refills._admitter.rules.filter_groups and refills.sync_refill_failed_groups
    assert refills.filter_groups_metric is None and refills._most_judged == 0


@pytest.mark.parametrize(
    ("others", "line"),
    [
        ([f"{SAMPLERS}.custom_sampler={{path: mine.py, name: Mine}}"], f"{SAMPLERS}.custom_sampler.path is 'mine.py'"),
        ([f"{DAPO}, max_inflight_gen_batches: 2}}"], "algorithm.filter_groups.max_inflight_gen_batches is 2, must be"),
        (["trainer.v1.sglang_pat_sync.unbiased=true", TURNS], "trainer.v1.sglang_pat_sync.unbiased is true, must be"),
        (["trainer.v1.sglang_pat_sync.filter_groups=true"], "trainer.v1.sglang_pat_sync has no option 'filter_groups'"),
        (["skip.rollout_tq.enable=true"], "skip.rollout_tq.enable is true, must be false with trainer.v1."),
        # verl would ask for several batches of a step, and get the same one.
        (["trainer.v1.sync.parameter_sync_step=2"], "trainer.v1.sync.parameter_sync_step is 2, must be 1 (or left"),
    ],
)
def test_refused_beside(others, line):
    with pytest.raises(ValueError) as refused:
        made(*others)
    assert str(refused.value).startswith(line) and "\n" not in str(refused.value)


def test_off_by_default():
    for given in ({}, {"tail_batching": "off"}, {"tail_batching": "off", "eta_prompts": 2.0}):
        assert options.make_tail_batching_rules(given, WHERE, **SIZES) is None
