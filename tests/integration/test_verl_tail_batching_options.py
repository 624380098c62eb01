"""Options of tail batching under verl, and what is refused."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from sglang_pat.integrations.verl import tail_batching
from sglang_pat.integrations.verl.tail_batching import TailBatchingBuffer

from .test_verl_tail_batching import BATCH, LIMIT, RESPONSES, SAMPLER, STRICT

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"tail_baching": "strict"}, "trainer.v1.sglang_pat_sync has no option 'tail_baching'; choose from"),
        ({"tail_batching": "all"}, "trainer.v1.sglang_pat_sync.tail_batching is 'all', must be strict, reorder or off"),
        (
            {"tail_batching": "partial"},
            "trainer.v1.sglang_pat_sync.tail_batching is 'partial', must be strict, reorder or off: verl's sync "
            "trainer starts each response from its prompt; for partial rollout set "
            "trainer.v1.trainer_mode=sglang_pat_colocate_async",
        ),
        ({"tail_batching": "strict", "eta_prompts": 0.5}, "trainer.v1.sglang_pat_sync.eta_prompts is 0.5, must be"),
        (
            {"tail_batching": "reorder", "unbiased": True},
            "trainer.v1.sglang_pat_sync.unbiased is for mode strict, not reorder",
        ),
        ({"tail_batching": "strict", "unbiased": "no"}, "trainer.v1.sglang_pat_sync.unbiased is 'no', must be true or"),
        (
            {"tail_batching": "strict", "max_deferrals": "many"},
            "trainer.v1.sglang_pat_sync.max_deferrals is 'many', mu",
        ),
        ({"tail_batching": "strict", "max_deferrals": None}, "trainer.v1.sglang_pat_sync.max_deferrals is None, must"),
        (
            {"tail_batching": "strict", "eta_prompts": "1.5x"},
            "trainer.v1.sglang_pat_sync.eta_prompts is '1.5x', must b",
        ),
    ],
)
def test_refused_in_one_line(options, line):
    with pytest.raises(ValueError) as refused:
        tail_batching.rules(options, BATCH, RESPONSES)
    assert str(refused.value).startswith(line) and "\n" not in str(refused.value)


def test_no_option_of_verls_other_modes():
    with pytest.raises(ValueError, match="has no option 'parameter_sync_step'; choose from"):
        tail_batching.rules({"parameter_sync_step": 2}, BATCH, RESPONSES)


@pytest.mark.parametrize("mode", ["colocate_async", "separate_async"])
def test_other_trainer_modes_have_no_tail_batching(mode):
    from sglang_pat.integrations.verl import trainers

    kind = {"colocate_async": trainers.AdaptiveColocateAsync, "separate_async": trainers.AdaptiveSeparateAsync}[mode]
    name = f"sglang_pat_{mode}"
    config = OmegaConf.create({"trainer": {"v1": {"trainer_mode": name, name: {"tail_batching": "partial"}}}})
    with pytest.raises(ValueError) as refused:
        kind(config)
    assert str(refused.value).startswith(f"trainer.v1.{name} has no option 'tail_batching', must be left out")


CONFIG = {
    "actor_rollout_ref": {"rollout": {"n": RESPONSES, "response_length": LIMIT}},
    "algorithm": {},
    "data": {"train_batch_size": BATCH},
    "reward": {"reward_model": {"enable": False}},
    "trainer": {"v1": {"sampler": SAMPLER, "sglang_pat_sync": STRICT}},
}


@pytest.mark.parametrize(
    "other",
    [
        "algorithm.filter_groups={enable: true, metric: reward}",
        "trainer.v1.sampler.custom_sampler={path: mine.py, name: Mine}",
        "trainer.v1.sampler.sync_refill_failed_groups=true",
    ],
)
def test_refused_beside_what_also_chooses_prompts(other):
    from sglang_pat.integrations.verl import trainers

    trainer = object.__new__(trainers.AdaptiveSync)
    trainer.trainer_mode = "sync"
    trainer.config = OmegaConf.create(CONFIG)
    assert isinstance(trainer._build_replay_buffer(), TailBatchingBuffer)
    trainer.config.merge_with_dotlist([other])
    with pytest.raises(ValueError) as refused:
        trainer._build_replay_buffer()
    assert str(refused.value) == (
        "trainer.v1.sglang_pat_sync.tail_batching chooses the prompts of a step: leave algorithm.filter_groups, "
        "trainer.v1.sampler.custom_sampler and trainer.v1.sampler.sync_refill_failed_groups out"
    )


def test_unbiased_is_refused_with_turns():
    from sglang_pat.integrations.verl import trainers

    trainer = object.__new__(trainers.AdaptiveSync)
    trainer.trainer_mode = "sync"
    trainer.config = OmegaConf.create(CONFIG)
    more = ["trainer.v1.sglang_pat_sync.unbiased=true", "actor_rollout_ref.rollout.multi_turn.enable=true"]
    trainer.config.merge_with_dotlist(more)
    with pytest.raises(ValueError, match=r"^trainer\.v1\.sglang_pat_sync\.unbiased is true, must be false with actor_"):
        trainer._build_replay_buffer()


@pytest.mark.parametrize("steps", [1, 2])
def test_a_batch_is_trained_on_once(steps):
    """verl would ask for several batches of a step, and get the same one."""
    from sglang_pat.integrations.verl import trainers

    trainer = object.__new__(trainers.AdaptiveSync)
    trainer.trainer_mode = "sync"
    trainer.config = OmegaConf.create(CONFIG)
    trainer.config.merge_with_dotlist([f"trainer.v1.sync.parameter_sync_step={steps}"])
    if steps == 1:
        assert isinstance(trainer._build_replay_buffer(), TailBatchingBuffer)
        return
    with pytest.raises(ValueError, match=r"^trainer\.v1\.sync\.parameter_sync_step is 2, must be 1 \(or left out\)"):
        trainer._build_replay_buffer()


def test_off_by_default():
    assert tail_batching.rules({}, 8, 2) is None and tail_batching.rules({"tail_batching": "off"}, 8, 2) is None
