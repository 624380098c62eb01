"""Which of verl's settings make a step that can be summed chunk by chunk; what verl has is asked, not listed."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import ActorConfig

from sglang_pat.integrations.verl import options

pytestmark = pytest.mark.integration

MODE = "sglang_pat_stream"
WHERE = f"trainer.v1.trainer_mode={MODE}"
ROLLOUT, V1 = "actor_rollout_ref.rollout", "trainer.v1"
ACTOR = "actor_rollout_ref.actor"
GOOD = (
    "data.train_batch_size=8", f"{ACTOR}.ppo_mini_batch_size=8", f"{ACTOR}.strategy=fsdp2",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=1", "algorithm.adv_estimator=grpo",
    f"{ROLLOUT}.name=sglang_pat", f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.checkpoint_engine.backend=nccl",
)  # fmt: skip
HYBRID = f"{V1}.separate_async.hybrid_rollout"
GROUPS, RESPONSES, TOKENS = 4, 3, 7


@functools.cache
def read_defaults() -> DictConfig:
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", list(GOOD))
    OmegaConf.set_struct(config, False)
    return config


def make_config(*overrides: str) -> DictConfig:
    return OmegaConf.merge(read_defaults(), OmegaConf.from_dotlist(list(overrides)))


def check(*overrides: str) -> None:
    options.check_stream(make_config(*overrides), MODE, "separate_async")


def is_allowed(*overrides: str) -> bool:
    try:
        check(*overrides)
    except ValueError:
        return False
    return True


def test_verls_defaults_are_allowed():
    check()
    check(f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.entropy_coeff=0.1")


REFUSED = {
    f"{ACTOR}.strategy=fsdp": "is fsdp, must be fsdp2",
    f"{ACTOR}.ppo_epochs=2": "is 2, must be 1",
    f"{ACTOR}.ppo_mini_batch_size=4": "is 4, must be data.train_batch_size, 8,",
    f"{ACTOR}.policy_loss.loss_mode=kl_cov": f"is kl_cov, must be {' or '.join(options.LOSSES)}",
    f"{ACTOR}.policy_loss.loss_mode=mine": f"is mine, must be {' or '.join(options.LOSSES)}",
    f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2": "is 2, must be 1",
    f"{ACTOR}.ulysses_sequence_parallel_size=2": "is 2, must be 1",
    "algorithm.adv_estimator=gae": f"is gae, must be {' or '.join(options.ESTIMATORS)}",
    "algorithm.adv_estimator=mine": f"is mine, must be {' or '.join(options.ESTIMATORS)}",
    "algorithm.use_kl_in_reward=true": "is true, must be false",
    "algorithm.rollout_correction.bypass_mode=true": "is true, must be false",
    "algorithm.rollout_correction.rollout_is_batch_normalize=true": "is true, must be false",
    "critic.enable=true": "is true, must be false",
    "distillation.enabled=true": "is true, must be false",
    "trainer.critic_warmup=1": "is 1, must be 0",
    f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm": "is null, must be a number, e.g. data.max_response_length,",
    f"{ACTOR}.fsdp_config.mixed_precision.param_dtype=fp16": "is fp16, must be bf16 or fp32",
    f"{ACTOR}.policy_loss.loss_mode=sapo": "is token-mean, must be seq-mean-token-mean for loss_mode=sapo",
    f"{ROLLOUT}.name=sglang": "is sglang, must be sglang_pat",
    f"{ROLLOUT}.nnodes=0": "is 0, must be at least 1",
    f"{ROLLOUT}.checkpoint_engine.backend=naive": "is naive, must be another one, e.g. nccl,",
    f"{V1}.sampler.custom_sampler.path=mine.py": "is 'mine.py', must be left out",
    # Given, and not used.
    f"{V1}.separate_async.num_warmup_batches=2": "is 2, must be 0 (or left out)",
    f"{V1}.separate_async.parameter_sync_step=2": "is 2, must be 1 (or left out)",
    f"{V1}.sampler.max_off_policy_threshold=2": "is 2, must be null (or left out)",
    f"{V1}.sampler.max_off_policy_strategy=wait": "is wait, must be left out",
    f"{HYBRID}.switch_threshold_ratio=0.5": "is 0.5, must be left out",
    f"{HYBRID}.adaptive_switch_threshold=false": "is false, must be left out",
    f"{HYBRID}.switch_threshold_step_up=0.5": "is 0.5, must be left out",
    f"{HYBRID}.switch_threshold_step_down=0.5": "is 0.5, must be left out",
    f"{HYBRID}.switch_threshold_release_steps=9": "is 9, must be left out",
    f"{HYBRID}.switch_cost_window_size=9": "is 9, must be left out",
}


@pytest.mark.parametrize("override", REFUSED)
def test_refused_in_one_line(override):
    with pytest.raises(ValueError) as refused:
        check(override)
    name = override.partition("=")[0].replace("loss_agg_mode", "loss_scale_factor")
    name = f"{ACTOR}.loss_agg_mode" if override.endswith("=sapo") else name
    line = str(refused.value)
    assert line.startswith(f"{name} {REFUSED[override]} with {WHERE}: ") and "\n" not in line, line


def test_each_setting_is_refused_somewhere():
    tried = {override.partition("=")[0] for override in REFUSED}
    assert {rule.option for rule in options.list_stream_rules(make_config(), "separate_async")} <= tried


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


MASK = torch.arange(TOKENS) < torch.randint(1, TOKENS + 1, (GROUPS * RESPONSES, 1), generator=draw(0))
GROUP_OF = np.repeat([f"prompt {i}" for i in range(GROUPS)], RESPONSES)


def compute_advantages(name: str, rows: slice) -> torch.Tensor:
    rewards = torch.zeros(MASK.shape)
    rewards[:, 0] = torch.rand(len(MASK), generator=draw(1)).round(decimals=1) * (torch.arange(len(MASK)) % 5 > 0)
    estimator = core_algos.get_adv_estimator_fn(name)
    algorithm = omega_conf_to_dataclass(make_config().algorithm)
    given = dict(token_level_rewards=rewards[rows].clone(), response_mask=MASK[rows].float(), index=GROUP_OF[rows])
    return estimator(**given, config=algorithm)[0]


@pytest.mark.parametrize("name", core_algos.ADV_ESTIMATOR_REGISTRY)
def test_advantages_that_follow_from_a_group_are_allowed(name):
    try:
        whole = compute_advantages(name, slice(None))
    except TypeError:  # it needs values, or log-probs, or rewards of other responses
        by_group = False
    else:
        groups = [compute_advantages(name, slice(i, i + RESPONSES)) for i in range(0, len(MASK), RESPONSES)]
        assert whole.abs().sum() > 0
        by_group = torch.allclose(torch.cat(groups), whole, atol=1e-6)
    assert is_allowed(f"algorithm.adv_estimator={name}") == by_group


def compute_gradient(actor: ActorConfig, rows: list[int], tokens: int, sequences: int) -> torch.Tensor:
    """The gradient of verl's loss of some rows, divided as a batch of so many tokens and sequences."""
    log_probs = -3 * torch.rand(MASK.shape, generator=draw(2))
    log_probs.requires_grad_()
    old = (log_probs + torch.randn(MASK.shape, generator=draw(3)) / 9).detach()
    advantages = torch.randn((len(MASK), 1), generator=draw(4)).expand(MASK.shape)
    actor.global_batch_info.update(dp_size=1, batch_num_tokens=tokens, global_batch_size=sequences)
    loss, _ = core_algos.get_policy_loss_fn(actor.policy_loss.loss_mode)(
        old_log_prob=old[rows], log_prob=log_probs[rows], advantages=advantages[rows], response_mask=MASK[rows],
        loss_agg_mode=actor.loss_agg_mode, config=actor,
    )  # fmt: skip
    return torch.autograd.grad(loss, log_probs)[0]


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("name", core_algos.POLICY_LOSS_REGISTRY)
def test_losses_that_are_sums_are_allowed(name, mode):
    settings = (f"{ACTOR}.policy_loss.loss_mode={name}", f"{ACTOR}.loss_agg_mode={mode}")
    if name == "bypass_mode":  # a sum by itself, but its old log-probs are the engine's
        assert not is_allowed(*settings)
        return
    own = {"dro_beta": 0.1, "kl_cov_ratio": 0.2, "clip_cov_ratio": 0.2, "clip_cov_lb": -9, "clip_cov_ub": 9}
    settings += tuple(f"{ACTOR}.policy_loss.{key}={value}" for key, value in own.items())
    actor = omega_conf_to_dataclass(make_config(*settings).actor_rollout_ref.actor)
    torch.manual_seed(0)
    order = torch.randperm(len(MASK), generator=draw(5)).tolist()
    tokens = int(MASK.sum())
    whole = compute_gradient(actor, order, tokens, len(order))
    sums = sum(compute_gradient(actor, rows, 1, 1) for rows in (order[:2], order[2:7], order[7:]))
    summed = torch.allclose(sums / (tokens if mode == "token-mean" else len(order)), whole, rtol=1e-4, atol=1e-7)
    assert is_allowed(*settings) == summed


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("rejection", [None, *sorted(rollout_corr_helper.SUPPORTED_ROLLOUT_RS_OPTIONS)])
def test_corrections_of_a_response_by_itself_are_allowed(rejection, level, normalize):
    ours = -torch.rand(MASK.shape, generator=draw(6))
    theirs = ours + torch.randn(MASK.shape, generator=draw(7)) / 9

    def correct(rows: slice) -> torch.Tensor:
        threshold = "0.95_1.05" if rejection and rejection.endswith("k1") else 0.05 if rejection else None
        weights, mask, _ = rollout_corr_helper.compute_rollout_correction_and_rejection_mask(
            ours[rows], theirs[rows], MASK[rows].float(), level, 2.0, normalize, rejection, threshold
        )
        return weights.batch["rollout_is_weights"] * mask

    groups = [correct(slice(i, i + RESPONSES)) for i in range(0, len(MASK), RESPONSES)]
    given = (f"rollout_is={level}", f"rollout_rs={rejection or 'null'}", f"rollout_is_batch_normalize={normalize}")
    allowed = is_allowed(*(f"algorithm.rollout_correction.{one}" for one in given))
    assert allowed == torch.allclose(torch.cat(groups), correct(slice(None)), atol=1e-6)
