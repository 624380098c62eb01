"""Options of a verl job for this engine, for streaming and for tail batching, checked before anything is started.

What is given and would not be used is refused, too.  Nothing of verl is imported with this module.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_pat import job_settings, settings
from sglang_pat.config import VARIABLE
from sglang_pat.layout import list_strides
from sglang_pat.policies.lending import STRIDE
from sglang_pat.rollout.rules import Rules
from stream_layers.judge_memory import parse_count
from stream_layers.refusals import check_model

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from verl.workers.config import RolloutConfig

NAME = "sglang_pat"
"""Value of ``rollout.name``."""
WHERE = f"rollout.engine_kwargs.{NAME}"
"""Option that holds our settings."""
STREAM = "stream_layers"
"""Setting of a reward model's engine, its only one: how many of its layers stay in host memory."""
SGLANG = "rollout.engine_kwargs.sglang"
"""Option that holds SGLang's own arguments, under either name."""
PREFIX = f"{NAME}_"
"""The beginning of our trainer modes' names; verl's name of the mode follows, or that of one that streams."""
TAIL_BATCHING = {"tail_batching", "eta_prompts", "max_deferrals", "unbiased"}
"""Options of tail batching, in ``trainer.v1.sglang_pat_sync`` and in those of the modes that stream."""
TAIL_BATCHING_MODES = ("strict", "reorder")
TRAINER_MODES = (f"{PREFIX}sync", f"{PREFIX}stream", f"{PREFIX}stream_lent")
"""Trainer modes that have tail batching."""
ESTIMATORS = ("grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo")
"""verl's advantages that compare a response with its group only.  The others need a critic, a mean over the batch, or
old log-probs."""
LOSSES = ("vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "dro", "cispo")
"""verl's policy losses that are sums.  The others choose tokens by rank in a micro-batch, or are means over one."""


class Rule(NamedTuple):
    """One option of verl's, the values that it may have (``None``: or left out), and why.

    Attributes:
        must_be: the values, or a function that says of a value whether it may be.
        said: ``must_be`` in words, where the values are not the words.
    """

    option: str
    must_be: tuple[Any, ...] | Callable[[Any], bool]
    why: str
    said: str = ""


_ONE_ENGINE = (
    f"an adaptive engine owns rollout.tensor_model_parallel_size GPUs and divides them itself, from {WHERE}.base_tp on"
)
_ENGINE_CANNOT = "an adaptive engine cannot do it"
ENGINE = (
    Rule("rollout.name", (NAME, "sglang"), f"{WHERE} is given, and an adaptive engine is SGLang"),
    Rule("rollout.data_parallel_size", (1,), _ONE_ENGINE),
    Rule("rollout.pipeline_model_parallel_size", (1,), _ONE_ENGINE),
    Rule("rollout.disaggregation.enabled", (False, None), "an adaptive engine does both itself"),
    Rule("rollout.expert_parallel_size", (1, None), _ENGINE_CANNOT),
    Rule("rollout.quantization", (None,), _ENGINE_CANNOT),
    Rule("rollout.mtp.enable_rollout", (False, None), _ENGINE_CANNOT),
)
"""Rules of an adaptive engine.  verl turns some of these options into arguments of SGLang's, which are refused."""

_ACTOR, _REFERENCE, _ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("actor", "ref", "rollout"))
_CORRECTION, _SAMPLER = "algorithm.rollout_correction", "trainer.v1.sampler"


def list_stream_rules(config: DictConfig, mode: str) -> list[Rule]:
    """The rules of a step whose gradients are summed chunk by chunk; ``mode`` is verl's own.

    Two things have to be so for verl's own step.  The advantages of a group follow from the group alone, because they
    are needed before the batch is complete.  And the loss is a sum over tokens or over sequences, divided by a number
    of the whole batch: only that number has to wait.
    """
    from verl.trainer.config import HybridRolloutSwitchConfig

    batch, aggregation = get_value(config, "data.train_batch_size"), f"{_ACTOR}.loss_agg_mode"
    loss, mean = get_value(config, f"{_ACTOR}.policy_loss.loss_mode"), get_value(config, aggregation)
    one_update, own_prompts = "gradients are summed for one update a step", "a step starts its own prompts"
    own_weights, whole = "all that a step trains on is of its weights", "a sequence is not divided among ranks"
    before = "it needs log-probs before the pass that trains; take use_kl_loss"
    rules = [
        Rule(f"{_ROLLOUT}.name", (NAME,), "it says of each token which weights generated it"),
        Rule(f"{_SAMPLER}.custom_sampler.path", ("", None), "each complete group is trained on", "left out"),
        Rule(f"{_ACTOR}.strategy", ("fsdp2",), "only there may a replica train while the others generate"),
        Rule(f"{_ACTOR}.ppo_epochs", (1,), one_update),
        Rule(f"{_ACTOR}.policy_loss.loss_mode", LOSSES, "others are no sums over tokens or sequences"),
        Rule(f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size", (1, None), whole),
        Rule(f"{_ACTOR}.ulysses_sequence_parallel_size", (1, None), whole),
        Rule("algorithm.adv_estimator", ESTIMATORS, "others need more than the responses of one prompt"),
        Rule("algorithm.use_kl_in_reward", (False, None), before),
        Rule(f"{_CORRECTION}.bypass_mode", (False, None), "the old log-probs are the trainer's own"),
        Rule(f"{_CORRECTION}.rollout_is_batch_normalize", (False, None), "the mean over the batch is known too late"),
        Rule("critic.enable", (False, None), "a critic's values are not summed"),
        Rule("distillation.enabled", (False, None), "a teacher's loss is not summed"),
        Rule("trainer.critic_warmup", (0, None), "there is no critic"),
        Rule(f"{_ACTOR}.ppo_mini_batch_size", (batch,), one_update, f"data.train_batch_size, {batch},"),
        Rule(
            f"{_ACTOR}.fsdp_config.mixed_precision.param_dtype", lambda kind: str(kind) not in ("fp16", "float16"),
            "a sum over a batch is too large for half precision", "bf16 or fp32",
        ),
        # verl's defaults are others than what streaming is.  Another value was given.
        Rule(f"trainer.v1.{mode}.num_warmup_batches", (0, 1, None), own_prompts, "0 (or left out)"),
        Rule(f"trainer.v1.{mode}.parameter_sync_step", (1, 4, None), one_update, "1 (or left out)"),
        Rule(f"{_SAMPLER}.max_off_policy_threshold", (None, 8), own_weights, "null (or left out)"),
        Rule(f"{_SAMPLER}.max_off_policy_strategy", ("drop", None), own_weights, "left out"),
    ]  # fmt: skip
    if mean == "seq-mean-token-sum-norm":
        why = f"with loss_agg_mode={mean} verl divides by the longest response of a micro-batch otherwise"
        allowed = "a number, e.g. data.max_response_length,"
        rules.append(Rule(f"{_ACTOR}.loss_scale_factor", lambda factor: factor is not None, why, allowed))
    if loss == "sapo":
        why = "verl's sapo is that mean, whatever is set"
        rules.append(Rule(aggregation, ("seq-mean-token-mean",), why, "seq-mean-token-mean for loss_mode=sapo"))
    if mode == "separate_async":
        why = "engines need GPUs of their own to generate while the trainer trains"
        backend, to_others = f"{_ROLLOUT}.checkpoint_engine.backend", "weights go to other GPUs"
        hybrid, by_room = "trainer.v1.separate_async.hybrid_rollout", "replicas are handed over by completion and KV"
        fields = dataclasses.fields(HybridRolloutSwitchConfig)
        unused = [field for field in fields if not field.name.startswith(("_", "enable_"))]
        rules += [
            Rule(f"{_ROLLOUT}.nnodes", lambda nodes: nodes > 0, why, "at least 1"),
            Rule(backend, lambda name: name != "naive", to_others, "another one, e.g. nccl,"),
            *(Rule(f"{hybrid}.{field.name}", (field.default, None), by_room, "left out") for field in unused),
        ]
    return rules


def list_lent_rules(config: DictConfig) -> list[Rule]:
    """The rules of a trainer some of whose ranks generate while the others train."""
    tensor_parallel, size = f"{_ROLLOUT}.tensor_model_parallel_size", f"{_ACTOR}.fsdp_config.fsdp_size"
    half, all_ranks = get_value(config, tensor_parallel) // STRIDE, "it is a pass of all ranks of the trainer, and some"
    rules = [
        Rule(f"{_ROLLOUT}.nnodes", (0,), "the engines have the trainer's GPUs"),
        Rule(f"{_ROLLOUT}.calculate_log_probs", (False,), f"{all_ranks} still generate"),
        Rule(tensor_parallel, lambda ranks: ranks % STRIDE == 0, "an engine lends half of its ranks", "even"),
        Rule(
            size, lambda ranks: 0 < ranks <= half and half % ranks == 0,
            "a replica of the trainer trains on lent ranks only",
            f"{half} or a divisor of it (half of {tensor_parallel})",
        ),
    ]  # fmt: skip
    if get_value(config, "reward.reward_model.enable"):
        why = "rewards are needed while the engines have the GPUs"
        rules.append(Rule("reward.reward_model.enable_resource_pool", (True,), why))
    return rules


def check_stream(config: DictConfig, name: str, mode: str, lent: bool = False) -> None:
    """Refuse what would not be the update of the whole batch, or cannot be at all, with summed gradients.

    Args:
        name: ``trainer.v1.trainer_mode``; ``mode``: verl's own, ``separate_async`` or ``colocate_async``.
        lent: the engines own the trainer's GPUs and lend it half of their ranks.

    Raises:
        ValueError: one line, in the words of verl's configuration.
    """
    where = f"trainer.v1.trainer_mode={name}"
    _check_rules(config, list_stream_rules(config, mode), where)
    if not lent:
        return
    from verl.utils.config import omega_conf_to_dataclass

    _check_rules(config, list_lent_rules(config), where)
    if get_value(config, f"{_ACTOR}.use_kl_loss"):
        why = "a replica of the reference policy works where one of the trainer does"
        both = {"strategy": "fsdp2", "fsdp_config.fsdp_size": get_value(config, f"{_ACTOR}.fsdp_config.fsdp_size")}
        same = [Rule(f"{_REFERENCE}.{option}", (value,), why) for option, value in both.items()]
        whole, ulysses = "a sequence is not divided among ranks", "ulysses_sequence_parallel_size"
        same += [Rule(f"{_REFERENCE}.{at}{ulysses}", (1, None), whole) for at in ("", "fsdp_config.")]
        why = "the reference policy is the actor without its adapter then"
        adapters = (f"actor_rollout_ref.model.{name}" for name in ("lora_rank", "lora.rank", "lora_adapter_path"))
        same += [Rule(option, lambda value: not value, why, "left out") for option in adapters]
        _check_rules(config, same, f"{where} and use_kl_loss")
    rollout: Any = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    ranks = rollout.tensor_model_parallel_size
    adaptive = job_settings.check(read_settings(rollout, 0), ranks, WHERE)
    needed, half = f"degrees with {ranks // STRIDE} and {ranks} among them", "half of an engine's ranks are lent"
    own = (
        Rule("gpu_order", ("rank",), "the trainer's ranks are in this order"),
        Rule("weights", lambda weights: weights != "reshard", "lent ranks would miss how weights move", "resident"),
        Rule("candidates", lambda _: STRIDE in list_strides(adaptive.layouts), half, needed),
    )
    degrees = [layout.tp for layout in adaptive.layouts]
    values = {"gpu_order": adaptive.gpu_order, "weights": adaptive.weights, "candidates": degrees}
    _check_rules(values, own, where, f"actor_rollout_ref.{WHERE}.")


def read_tail_batching(config: DictConfig, where: str, mode: str) -> Rules | None:
    """Rules of a job's tail batching; None: it has none.

    Args:
        where: option that holds those of tail batching, e.g. ``trainer.v1.sglang_pat_sync``.
        mode: verl's own name of the trainer mode.

    Raises:
        ValueError: options that cannot be, or a job that cannot have them; one line.
    """
    judges = get_value(config, "algorithm.filter_groups.enable")
    filters = judges or get_value(config, f"{_SAMPLER}.sync_refill_failed_groups")
    rules = make_tail_batching_rules(
        get_value(config, where) or {}, where, num_prompts=get_value(config, "data.train_batch_size"),
        num_responses=get_value(config, f"{_ROLLOUT}.n"), filter_groups=bool(filters),
    )  # fmt: skip
    if rules is None:
        return None
    if rules.unbiased:
        why = "what stops a prompt is time then, not length"
        turns = get_value(config, turns_option := f"{_ROLLOUT}.multi_turn.enable")
        _check_rules(config, [Rule(f"{where}.unbiased", lambda _: not turns, why, "false")], turns_option)
    own, one = "it chooses the prompts of a step itself", "1 (or left out)"
    beside = [
        Rule(f"trainer.v1.{mode}.parameter_sync_step", (1, None), "a step has one batch, for one update", one),
        Rule(f"{_SAMPLER}.custom_sampler.path", ("", None), own, "left out"),
        Rule("skip.rollout_tq.enable", (False, None), own),
    ]
    if judges:
        why = "how many prompts run at once follows from eta_prompts and from how many groups were of use"
        beside.append(Rule("algorithm.filter_groups.max_inflight_gen_batches", (1, None), why, one))
    _check_rules(config, beside, f"{where}.tail_batching")
    return rules


def make_tail_batching_rules(options: Mapping[str, Any], where: str, **sizes: Any) -> Rules | None:
    """The admitter's rules by these options; arguments and errors as of :func:`read_tail_batching`."""
    if unknown := sorted(set(options) - TAIL_BATCHING):
        raise ValueError(f"{where} has no option {unknown[0]!r}; choose from {', '.join(sorted(TAIL_BATCHING))}")
    mode, modes = options.get("tail_batching"), ", ".join(TAIL_BATCHING_MODES)
    others = {name: value for name, value in options.items() if name != "tail_batching"}
    if mode is None and others:
        raise ValueError(f"{where}.{min(others)} is given and tail_batching is not, must be {modes} or off")
    if mode in (None, False, "off"):
        return None
    if mode not in TAIL_BATCHING_MODES:
        why = (
            ": verl starts each response from its prompt here; for partial rollout set "
            f"trainer.v1.trainer_mode={PREFIX}colocate_async"
        ) if mode == "partial" else ""  # fmt: skip
        raise ValueError(f"{where}.tail_batching is {mode!r}, must be {modes} or off{why}")
    try:
        return Rules(mode=mode, eta_responses=1.0, **sizes, **others)
    except ValueError as error:
        raise ValueError(f"{where}.{error}") from None


def has_tail_batching(config: DictConfig) -> bool:
    """Whether a job asks for tail batching.  In a worker the name of its trainer mode is verl's own, and no sign."""
    version = config.trainer.v1
    return any((version.get(mode) or {}).get("tail_batching") in TAIL_BATCHING_MODES for mode in TRAINER_MODES)


def set_verls_mode(config: DictConfig, mode: str, own: str | None, streams: bool) -> DictConfig:
    """A copy with verl's own name of the trainer mode, for which verl asks in several places.

    Args:
        mode: verl's own name.
        own: name of the mode whose options hold; None: the mode has none.
        streams: set what streaming needs, too: a batch, its update, the next batch.

    Raises:
        ValueError: options of another mode of ours are given; one line.
    """
    from omegaconf import open_dict

    for name, values in config.trainer.v1.items():
        if name.startswith(PREFIX) and name != own and values:
            why = f"those of this mode are in trainer.v1.{own}" if own else (
                "verl's own loop carries unfinished responses over there; tail batching is an option of "
                f"{', '.join(TRAINER_MODES[:-1])} and {TRAINER_MODES[-1]}"
            )  # fmt: skip
            raise ValueError(f"trainer.v1.{name} has no option {min(values)!r}, must be left out: {why}")
    config = deepcopy(config)
    with open_dict(config.trainer.v1):
        config.trainer.v1.trainer_mode = mode
        if streams:
            config.trainer.v1[mode].parameter_sync_step, config.trainer.v1[mode].num_warmup_batches = 1, 0
            config.trainer.v1.sampler.max_off_policy_threshold = None
    return config


def get_own_settings(config: RolloutConfig) -> Mapping[str, Any] | None:
    """Our settings in the rollout's configuration; ``None``: it has none, ``{}`` are some.

    Raises:
        ValueError: they are something else.
    """
    own = (config.engine_kwargs or {}).get(NAME)
    if own is not None and not isinstance(own, Mapping):
        raise ValueError(f"{WHERE} is {own!r}, must be settings by name, e.g. {{base_tp: 1, policy: pat}}")
    return own


def is_adaptive(config: RolloutConfig, helper: bool) -> bool:
    """Whether a replica is an adaptive engine: its name says so, its settings, or the variable ``SGLANG_PAT``.

    Args:
        config: configuration of the replica's rollout.
        helper: it is a reward model or a teacher.  Such a one is always verl's own: the variable and the name, which a
            teacher takes over from the policy, are about the policy's engines.

    Raises:
        ValueError: settings of the one kind of engine for the other; one line.
    """
    own = get_own_settings(config)
    settings_given = own is not None
    if helper and settings_given and set(own) != {STREAM}:
        raise ValueError(
            f"{WHERE} is given for a reward model or a teacher, must be left out there, or only have {STREAM}: only "
            "the policy's engines are adaptive"
        )
    if not helper and settings_given and STREAM in own:
        raise ValueError(
            f"{WHERE}.{STREAM} is for a reward model or a teacher, must be left out here: the policy's engines keep "
            "all layers on their GPUs"
        )
    by_variable = VARIABLE in os.environ and config.name == "sglang"  # vLLM's rollouts are none of its business
    return not helper and (settings_given or config.name == NAME or by_variable)


def read_stream_setting(config: RolloutConfig, model: str | None = None) -> str | None:
    """Value that a reward model or a teacher has for :data:`STREAM`; None if it has none.

    Args:
        model: folder or name of its model, where it is known.

    Raises:
        ValueError: a wrong value, or a model that cannot be streamed; one line.
    """
    own = get_own_settings(config)
    if own is None:
        return None
    value, where = str(own[STREAM]), f"{WHERE}.{STREAM}"
    count = parse_count(value, where)
    if model is not None:
        check_model(model, count, where)
    return value


def read_settings(config: RolloutConfig, replica: int | None = None) -> dict[str, Any]:
    """Our settings of this job: those of the variable ``SGLANG_PAT``, then those of the rollout's configuration.

    With ``replica`` they are those of the engine of this number (:func:`sglang_pat.settings.make_engine_settings`).
    """
    own = settings.read_environment() | dict(get_own_settings(config) or {})
    return own if replica is None else settings.make_engine_settings(own, replica)


def check(config: RolloutConfig, gpus_per_node: int | None = None, model: Any = None) -> None:
    """Refuse, in one line, what this engine cannot do as a rollout of verl's.

    Args:
        config: configuration of the rollout.
        gpus_per_node: number of GPUs of each of the job's nodes, where it is known.
        model: verl's configuration of the model, where it is known.

    Raises:
        ValueError: an unknown setting, a wrong value, degrees that do not fit the GPUs, a file that cannot be used, a
            feature or a model that the engine refuses; in the words of verl's configuration.
    """
    tp = config.tensor_model_parallel_size
    _check_rules({"rollout": config}, ENGINE)
    if gpus_per_node is not None and (tp > gpus_per_node or gpus_per_node % tp):
        raise ValueError(
            f"rollout.tensor_model_parallel_size is {tp}, must divide the node's {gpus_per_node} GPUs: "
            f"{settings.format_divisors(gpus_per_node)}; an adaptive engine of {gpus_per_node} owns them all"
        )
    adaptive_config = job_settings.check(read_settings(config, 0), tp, WHERE)
    job_settings.check_flags((config.engine_kwargs or {}).get("sglang") or {}, f"{SGLANG}.")
    if model is None:
        return
    if not get_value(model, "lora.merge"):
        why, allowed = "an adaptive engine serves no adapters", "0 (or model.lora.merge true)"
        names = "model.lora_rank", "model.lora.rank"
        _check_rules({"model": model}, [Rule(name, lambda rank: not rank, why, allowed) for name in names])
    job_settings.check_model(model.path, adaptive_config, "model.path")
    if get_value(config, "enable_rollout_routing_replay"):
        job_settings.check_routed_experts(model.path, "rollout.enable_rollout_routing_replay is true")


def _check_rules(config: Any, rules: Iterable[Rule], where: str = "", prefix: str = "") -> None:
    """Raise ValueError, one line, for the first rule that does not hold.

    Args:
        where: setting that asks for it; empty: the engine does.
        prefix: beginning of the options' names in the message.
    """
    for option, must_be, why, allowed in rules:
        value = get_value(config, option)
        if must_be(value) if callable(must_be) else value in must_be:
            continue
        if not allowed and not callable(must_be):
            allowed = " or ".join(_show(one) for one in must_be if one is not None or len(must_be) == 1)
        raise ValueError(
            f"{prefix}{option} is {_show(value)}, must be {allowed}{f' with {where}' if where else ''}: {why}"
        )


def _show(value: Any) -> str:
    """A value as the configuration has it; a path in quotes."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return repr(value) if isinstance(value, str) and not re.fullmatch(r"[\w-]+", value) else str(value)


def get_value(config: Any, name: str) -> Any:
    """A value of a configuration, whose parts are objects or mappings; None if there is none."""
    for part in name.split("."):
        config = config.get(part) if hasattr(config, "get") else getattr(config, part, None)
    return config
