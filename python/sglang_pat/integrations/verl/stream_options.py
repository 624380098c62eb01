"""With which of verl's settings summed gradients give verl's own step: checked before a model is loaded.

Two things have to be so.  The advantages of a group follow from the group alone, because they are needed before the
batch is complete.  And the loss is a sum over tokens or over sequences, divided by a number of the whole batch: only
that number has to wait.
"""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf
from verl.utils.config import omega_conf_to_dataclass

from sglang_pat import job_settings
from sglang_pat.config import AdaptiveConfig
from sglang_pat.integrations.verl import options
from sglang_pat.layout import list_strides
from sglang_pat.policies.lending import STRIDE

ESTIMATORS = ("grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo")
"""verl's advantages that compare a response with its group only.  The others need a critic, a mean over the batch, or
old log-probs."""
LOSSES = ("vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "dro", "cispo")
"""verl's policy losses that are sums.  The others choose tokens by rank in a micro-batch, or are means over one."""
_ACTOR = "actor_rollout_ref.actor"
_CORRECTION = "algorithm.rollout_correction"
_ONE_UPDATE = "gradients are summed for one update a step"
_FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    f"{_ACTOR}.strategy": (("fsdp2",), "only there may a replica train while the others generate"),
    f"{_ACTOR}.ppo_epochs": ((1,), _ONE_UPDATE),
    f"{_ACTOR}.policy_loss.loss_mode": (LOSSES, "others are no sums over tokens or sequences"),
    f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size": ((1, None), "a sequence is not divided among ranks"),
    f"{_ACTOR}.ulysses_sequence_parallel_size": ((1, None), "a sequence is not divided among ranks"),
    "algorithm.adv_estimator": (ESTIMATORS, "others need more than the responses of one prompt"),
    "algorithm.use_kl_in_reward": ((False, None), "it needs log-probs before the pass that trains; take use_kl_loss"),
    f"{_CORRECTION}.bypass_mode": ((False, None), "the old log-probs are the trainer's own"),
    f"{_CORRECTION}.rollout_is_batch_normalize": ((False, None), "the mean over the batch is known too late"),
    "critic.enable": ((False, None), "a critic's values are not summed"),
    "distillation.enabled": ((False, None), "a teacher's loss is not summed"),
    "trainer.critic_warmup": ((0, None), "there is no critic"),
}
"""Setting: what it may be (``None``: or left out), and why."""
_ALL_RANKS = "it is a pass of all ranks of the trainer, and some still generate"
_FIXED_WHILE_LENT: dict[str, tuple[tuple[Any, ...], str]] = {
    "actor_rollout_ref.rollout.nnodes": ((0,), "the engines have the trainer's GPUs"),
    "actor_rollout_ref.rollout.calculate_log_probs": ((False,), _ALL_RANKS),
}


def check(config: DictConfig, where: str) -> None:
    """Refuse what is not exact, or not possible, with summed gradients.

    Args:
        config: of the job.
        where: the setting that asks for them, e.g. ``trainer.v1.trainer_mode=sglang_pat_stream``.

    Raises:
        ValueError: in one line that names the setting.
    """

    def get(name: str) -> Any:
        return OmegaConf.select(config, name)

    _check_fixed(config, _FIXED, where)
    batch, mini_batch = get("data.train_batch_size"), get(f"{_ACTOR}.ppo_mini_batch_size")
    if mini_batch != batch:
        raise _refuse(
            f"{_ACTOR}.ppo_mini_batch_size", mini_batch, f"data.train_batch_size, {batch},", where, _ONE_UPDATE
        )
    mode = get(f"{_ACTOR}.loss_agg_mode")
    if mode == "seq-mean-token-sum-norm" and get(f"{_ACTOR}.loss_scale_factor") is None:
        why = f"with loss_agg_mode={mode} verl divides by the longest response of a micro-batch otherwise"
        raise _refuse(f"{_ACTOR}.loss_scale_factor", None, "a number, e.g. data.max_response_length,", where, why)
    if get(f"{_ACTOR}.policy_loss.loss_mode") == "sapo" and mode != "seq-mean-token-mean":
        why = "verl's sapo is that mean, whatever is set"
        raise _refuse(f"{_ACTOR}.loss_agg_mode", mode, "seq-mean-token-mean for loss_mode=sapo", where, why)
    name = f"{_ACTOR}.fsdp_config.mixed_precision.param_dtype"
    if str(precision := get(name)) in ("fp16", "float16"):
        raise _refuse(name, precision, "bf16 or fp32", where, "a sum over a batch is too large for half precision")


def check_lent(config: DictConfig, where: str) -> AdaptiveConfig:
    """Refuse what needs all of the trainer's ranks, or an engine that cannot lend half of its own, while some of them
    generate and the others train; arguments and errors as of :func:`check`.  Returns the engines' settings."""
    _check_fixed(config, _FIXED_WHILE_LENT, where)
    models = OmegaConf.select(config, "reward.reward_model")
    if models.enable and not models.enable_resource_pool:
        why = "rewards are needed while the engines have the GPUs"
        raise _refuse("reward.reward_model.enable_resource_pool", False, "true", where, why)
    name, tensor_parallel = f"{_ACTOR}.fsdp_config.fsdp_size", "actor_rollout_ref.rollout.tensor_model_parallel_size"
    size, ranks = OmegaConf.select(config, name), OmegaConf.select(config, tensor_parallel)
    half = ranks // STRIDE
    if ranks % STRIDE:
        raise _refuse(tensor_parallel, ranks, "even", where, "an engine lends half of its ranks")
    if not (0 < size <= half and half % size == 0):
        why = "a replica of the trainer trains on lent ranks only"
        raise _refuse(name, size, f"{half} or a divisor of it (half of {tensor_parallel})", where, why)
    reference, why = "actor_rollout_ref.ref", "a replica of the reference policy works where one of the trainer does"
    if OmegaConf.select(config, f"{_ACTOR}.use_kl_loss"):
        for part, must_be in {"strategy": "fsdp2", "fsdp_config.fsdp_size": size}.items():
            if (value := OmegaConf.select(config, f"{reference}.{part}")) != must_be:
                raise _refuse(f"{reference}.{part}", value, must_be, f"{where} and use_kl_loss", why)
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    adaptive = job_settings.check(options.read_settings(rollout, 0), ranks, options.WHERE)
    given = f"actor_rollout_ref.{options.WHERE}"
    if adaptive.gpu_order != "rank":
        raise _refuse(f"{given}.gpu_order", adaptive.gpu_order, "rank", where, "the trainer's ranks are in this order")
    if adaptive.weights == "reshard":
        raise _refuse(f"{given}.weights", "reshard", "resident", where, "lent ranks would miss how weights move")
    if STRIDE not in list_strides(adaptive.layouts):
        degrees = [layout.tp for layout in adaptive.layouts]
        why = "half of an engine's ranks are lent"
        raise _refuse(f"{given}.candidates", degrees, f"degrees with {half} and {ranks} among them", where, why)
    return adaptive


def _check_fixed(config: DictConfig, fixed: dict[str, tuple[tuple[Any, ...], str]], where: str) -> None:
    for name, (allowed, why) in fixed.items():
        if (value := OmegaConf.select(config, name)) not in allowed:
            names = [str(one).lower() if isinstance(one, bool) else str(one) for one in allowed if one is not None]
            raise _refuse(name, value, " or ".join(names) or "left out", where, why)


def _refuse(name: str, value: Any, allowed: str, where: str, why: str) -> ValueError:
    shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else value
    return ValueError(f"{name} is {shown}, must be {allowed} with {where}: {why}")
