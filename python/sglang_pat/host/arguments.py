"""SGLang's arguments with ours: parsed, checked, read into values, and shown to each part of the engine.

Built on SGLang's fork point ``Engine.server_args_class``.  What the user writes (``--tp 1 --dp 2``) is the base
layout.  :func:`prepare_start` has :mod:`sglang_pat.launch.spec` compute of it what the engine is.  From then on the
TokenizerManager, HTTP clients and RL frameworks see one engine of ``tp * dp`` ranks (:func:`make_outer_view`), each
rank's scheduler one replica of the base layout (:func:`make_rank_view`).  Every refusal is a ``ValueError`` of one
line.

What SGLang decides is in the fields of the arguments that :func:`resolve` returns, and of the views made of them.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from sglang.srt.configs.model_config import AttentionArch, ModelConfig
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils import cpu_has_amx_support, is_cuda

from sglang_pat.config import AdaptiveConfig
from sglang_pat.cpu import shm
from sglang_pat.errors import format_one_line
from sglang_pat.figures import job_log
from sglang_pat.host import adapter, sharing
from sglang_pat.host.assign import assign
from sglang_pat.host.guard import check_overrides
from sglang_pat.launch.contract import check_sglang
from sglang_pat.launch.processes import get_private_folder
from sglang_pat.launch.refusals import (
    MLA,
    WINDOW,
    check_model_path,
    check_second_port,
    find_reason_in_fields,
    refuse_flags,
    refuse_kind,
    refuse_routed_experts,
)
from sglang_pat.launch.spec import EngineSpec, resolve_spec
from sglang_pat.layout import ParallelLayout, choose_default_degrees, list_candidate_layouts
from sglang_pat.memory.memory_plan import Demand, MemoryPlan
from sglang_pat.memory.shapes import ModelShape
from sglang_pat.predict import profile as profiles
from sglang_pat.predict.profile import Fingerprint
from sglang_pat.rank.draft_model import count_head_bytes
from sglang_pat.settings import SETTINGS, add_flags, make_configuration
from sglang_pat.speculate.acceptance import MOST_ROWS
from sglang_pat.version import __version__

logger = logging.getLogger(__name__)

PLANNED_FRACTION = 0.98
"""``mem_fraction_static`` where ranks share memory: the plan decides there, and SGLang's limit is out of its way."""

INTERNAL = ("pat_fraction_given", "pat_graphs_given", "pat_in_a_job")
"""Fields without a flag: whether ``mem_fraction_static`` and the sizes of decode graphs are the user's, which is set
here, and whether a framework has launched the engine, whose log shows only our lines below an error (``attach``)."""

FIELDS: list[tuple[str, Any, Any]] = [
    *((one.field, str | None if one.default is None else type(one.default), one.default) for one in SETTINGS),
    *((name, bool, False) for name in ("adaptive_tp", *INTERNAL)),
]
"""Name, type and default of the adaptive engine's fields, all of them plain values."""


class AdaptiveMethods:
    """SGLang's ``ServerArgs`` with the adaptive engine's :data:`FIELDS`."""

    _spec = None  # no field: SGLang shows these to clients

    @staticmethod
    def add_cli_args(parser) -> None:
        ServerArgs.add_cli_args(parser)
        parser.set_defaults(**dict.fromkeys(INTERNAL, False))
        add_flags(parser)

    @property
    def resolved(self) -> bool:
        return self._spec is not None

    @property
    def spec(self) -> EngineSpec:
        """The engine's layouts and sizes; there from :func:`prepare_start` on, in all its processes."""
        assert self._spec is not None, "not resolved"
        return self._spec

    def read_config(self) -> AdaptiveConfig:
        """Read the settings, for what is decided before there is a :attr:`spec`.

        Raises:
            ValueError: an impossible layout, candidate or mode.
        """
        fields = adapter.arguments.get_fields(self)
        base = ParallelLayout(fields["tp_size"], fields["dp_size"])
        return make_configuration(fields, base, fields["max_running_requests"])


def _fill_in(args: Any, fill_in: Callable[[], None]) -> None:
    """Have SGLang fill in what is open in ``args``, with our defaults, and check what the user gave and what it chose.

    Raises:
        ValueError: something is given that the adaptive engine does not support.
    """
    if args.adaptive_tp:
        fraction, graphs = args.mem_fraction_static is not None, adapter.arguments.are_graph_sizes_given(args)
        assign(args, pat_fraction_given=fraction, pat_graphs_given=graphs)
        # Before SGLang's own handling, which turns some of these into other errors.
        _refuse_flags(args)
        args.read_config()
        _set_cpu_defaults(args)
        _set_mixture_defaults(args)
        adapter.arguments.disable_prefill_graphs(args)
        check_model_path(args.model_path)
        check_second_port(args.port)
    try:
        fill_in()
    except OSError as error:  # as transformers says that there is no such model, in several lines
        raise ValueError(f"--model-path {args.model_path}: {format_one_line(error)}") from None
    if args.adaptive_tp:
        model = ModelConfig.from_server_args(args)
        refuse_model(model)
        if args.enable_return_routed_experts:
            refuse_routed_experts(model.hf_config.architectures, "--enable-return-routed-experts")
        # Again: SGLang has chosen what was left open.
        _refuse_flags(args)
        refuse_graphs(args)
        drop_impossible_candidates(args)


if TYPE_CHECKING:

    class AdaptiveServerArgs(AdaptiveMethods, ServerArgs):
        pat_in_a_job: bool
        host: str
        port: int
        enable_metrics: bool

else:
    AdaptiveServerArgs = adapter.arguments.make_class("AdaptiveServerArgs", AdaptiveMethods, FIELDS, _fill_in)


def make_arguments(**fields: Any) -> AdaptiveServerArgs:
    """Arguments with these fields, checked, with all that is left open filled in.

    Raises:
        ValueError: something is given that the adaptive engine does not support.
    """
    return resolve(AdaptiveServerArgs(**fields))


def resolve(args: AdaptiveServerArgs) -> AdaptiveServerArgs:
    """``args`` with all that was left open filled in; raises as :func:`make_arguments`."""
    return adapter.arguments.resolve(args)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors do not list SGLang's hundreds of flags."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (--help lists our flags, --help-sglang those of SGLang)")


def parse_args(argv: list[str]) -> AdaptiveServerArgs:
    """Parse the command line as SGLang does, with the adaptive flags added.

    Raises:
        ValueError: something is given that the adaptive engine does not support.
    """
    parser = _Parser(prog="python -m sglang_pat.launch_server")
    AdaptiveServerArgs.add_cli_args(parser)
    if "--config" in argv:
        argv = adapter.arguments.ConfigArgumentMerger(parser).merge_config_with_args(argv)
    raw = parser.parse_args(argv)
    # With force: SGLang (0.5.23) has configured it when it was imported, and shows warnings only.
    shown = "[%(asctime)s] %(message)s"
    logging.basicConfig(level=raw.log_level.upper(), format=shown, datefmt="%Y-%m-%d %H:%M:%S", force=True)
    return resolve(AdaptiveServerArgs.from_cli_args(raw))


def prepare_start(args: AdaptiveServerArgs) -> AdaptiveServerArgs:
    """The outer view of ``args``, checked, with its :class:`EngineSpec`; what is ready already comes back as it is.

    Raises:
        SGLangMismatch: another SGLang, or one that lacks what we override.
        ValueError: as :func:`make_arguments`; files that cannot be used, memory that does not suffice.
    """
    if args.resolved:
        return args
    check_sglang()
    check_overrides()
    get_private_folder()
    args = resolve(args)
    spec = make_spec(args)
    view = make_outer_view(args if spec.memory is None else set_pool_size(args, spec.memory), spec)
    if args.device == "cuda":
        for line in format_gpu_lines(args, spec):
            logger.warning(line)
    if spec.memory is not None:
        for line in spec.memory.format_table().splitlines():
            logger.info(line)
        if spec.advice:
            logger.warning(spec.advice)
    return view


def make_outer_view(args: AdaptiveServerArgs, spec: EngineSpec) -> AdaptiveServerArgs:
    """``args`` as one engine of N ranks, which the TokenizerManager and ``/server_info`` show.

    With ``dp_size == 1`` SGLang's control calls expect one reply, whatever the layout.
    """
    view = adapter.arguments.make_view(args, tp_size=spec.config.num_ranks, dp_size=1)
    assign(view, _spec=spec)
    return view


def make_rank_view(args: AdaptiveServerArgs) -> AdaptiveServerArgs:
    """``args`` as one replica of the base layout, with which each rank's scheduler is built."""
    return adapter.arguments.make_view(args, tp_size=args.spec.config.base.tp, dp_size=1)


# -- what is read of SGLang's arguments and of its view of a model -----------------------------------------------------


def make_spec(args: AdaptiveServerArgs) -> EngineSpec:
    """The specification of an engine with these arguments; raises as :func:`~sglang_pat.launch.spec.resolve_spec`."""
    config = args.read_config()
    return resolve_spec(
        config=config,
        fingerprint=None if config.profile is None else make_fingerprint(args, config),
        demand=make_demand(args, config),
        device=args.device,
        captured=adapter.arguments.list_graph_sizes(args),
        captured_given=args.pat_graphs_given,
        has_graphs=_has_graphs(args),
        first_gpu=args.base_gpu_id,
        gpu_step=args.gpu_id_step,
        shared=sharing.is_gpu_shared(),
    )


def make_demand(args: AdaptiveServerArgs, config: AdaptiveConfig) -> Demand:
    """Everything that needs memory, but for the graphs of the layouts above the base.

    SGLang sizes its pool in each rank, after loading, from what the whole machine has free (84% of it on a CPU, for
    every rank) and knows nothing of other layouts; the plan sizes it once, for all ranks, before they start.
    """
    shape = read_model_shape(ModelConfig.from_server_args(args))
    chunk = args.chunked_prefill_size
    return Demand(
        shape=shape,
        base=config.base,
        degrees=tuple(layout.tp for layout in config.layouts),
        prefill_tokens=chunk if chunk and chunk > 0 else args.max_prefill_tokens,
        graph_batch=adapter.arguments.get_largest_graph(args) if _has_graphs(args) else 0,
        max_running=args.max_running_requests,
        tokens=args.max_total_tokens,
        fraction=args.mem_fraction_static if args.pat_fraction_given else None,
        extra_weights=_count_extra_weights(config, shape),
        gathers=config.kv_exchange == "allgather",
    )


def _count_extra_weights(config: AdaptiveConfig, shape: ModelShape) -> int:
    # ``reshard`` moves one parameter at a time, the largest of which is then there twice; else all are views.
    moved = 2 * shape.largest_parameter * shape.item if config.weights == "reshard" else 0
    if config.draft_model is None:
        return moved
    try:
        return moved + count_head_bytes(Path(config.draft_model), MOST_ROWS, shape.item)
    except ValueError as error:
        raise ValueError(f"--pat-draft-model {config.draft_model}: {error}") from None


def _has_graphs(args: AdaptiveServerArgs) -> bool:
    return args.device == "cuda" and adapter.arguments.has_decode_graphs(args)


def read_model_shape(model: ModelConfig) -> ModelShape:
    """Sizes of a model, as SGLang reads its config."""
    shape = ModelShape.from_config(model.hf_text_config.to_dict(), str(model.dtype).removeprefix("torch."))
    return replace(shape, context=model.context_len)


def make_fingerprint(
    args: AdaptiveServerArgs, config: AdaptiveConfig, kv_tokens: int = 0, max_running: int = 0
) -> Fingerprint:
    """The fingerprint of an engine with these arguments.

    Args:
        kv_tokens, max_running: KV slots and requests of one replica of the base layout; known once a rank is up.
    """
    model = ModelConfig.from_server_args(args)
    shape, hf = read_model_shape(model), model.hf_text_config
    sizes = (
        f"L{model.num_hidden_layers} H{model.hidden_size} heads{model.num_attention_heads}/"
        f"{model.get_total_num_kv_heads()}x{model.head_dim} I{hf.intermediate_size} V{model.vocab_size}"
    )
    if (mixture := shape.mixture) is not None:
        sizes += f" E{mixture.per_token}/{mixture.experts}x{mixture.width}+{mixture.shared_width}"
    return Fingerprint(
        model=f"{(model.hf_config.architectures or ['?'])[0]} {sizes}",
        dtype=str(model.dtype).removeprefix("torch."),
        device=torch.cuda.get_device_name() if args.device == "cuda" else profiles.read_cpu_model(),
        attention=args.attention_backend or "default",
        num_ranks=config.num_ranks,
        base_tp=config.base.tp,
        degrees=tuple(layout.tp for layout in config.layouts),
        link=str(shm.get_current_link() or "none"),
        weights=config.weights,
        kv_exchange=config.kv_exchange,
        kv_tokens=kv_tokens,
        max_running=max_running,
        sglang=metadata.version("sglang"),
        torch=str(torch.__version__),
        package=__version__,
    )


def format_gpu_lines(args: AdaptiveServerArgs, spec: EngineSpec) -> list[str]:
    """Lines of the log that a user of an engine on GPUs should read."""
    if not adapter.arguments.has_decode_graphs(args):
        graphs = "decode runs without CUDA graphs"
    else:
        upto = ", ".join(f"tp{tp} up to batch {max(sizes)}" for tp, sizes in spec.graph_sizes.items() if sizes)
        graphs = f"decode graphs: {upto}"
    gpus, config = " ".join(map(str, spec.gpus)), spec.config
    return [
        "sglang_pat has run on one H100 that ranks shared, and on no node of several GPUs: please report what you see",
        f"{graphs}; prefill runs without CUDA graphs in every layout",
        f"ranks 0 to {config.num_ranks - 1} run on GPUs {gpus} (--pat-gpu-order {config.gpu_order})",
    ]


# -- what is chosen and refused ----------------------------------------------------------------------------------------


def set_pool_size(args: AdaptiveServerArgs, plan: MemoryPlan) -> AdaptiveServerArgs:
    """``args`` with the pool size of the plan; what the user gave stays."""
    chosen: dict[str, Any] = {}
    if not args.pat_fraction_given:
        ours = args.device == "cpu" or sharing.is_gpu_shared()
        chosen["mem_fraction_static"] = PLANNED_FRACTION if ours else round(plan.static_fraction, 4)
    # On a GPU a fraction is SGLang's to apply: it has measured what is free by then.
    if args.device == "cpu" or not args.pat_fraction_given:
        chosen["max_total_tokens"] = plan.tokens
    return adapter.arguments.make_view(args, **chosen)


def _refuse_flags(args: AdaptiveServerArgs) -> None:
    """Raise ``ValueError`` for what cannot cross a switch: one line with what was given and what to change.

    To be called before SGLang fills in what is open, which turns some of these into other errors, and after it, when
    SGLang has chosen values by itself.
    """
    fields = adapter.arguments.get_fields(args)
    if fields["device"] == "cpu" and cpu_has_amx_support():
        # It packs the base layout's weights in place, and the other layouts would be sliced from packed bytes.
        raise ValueError("--adaptive-tp does not support SGLang's AMX kernels: use an sgl-kernel without them")
    refuse_flags(fields)


def refuse_model(model: ModelConfig) -> None:
    """Raise ``ValueError`` with one line for a model that cannot cross a switch."""
    if why := _find_unsupported_reason(model, model.hf_text_config):
        refuse_kind((model.hf_config.architectures or ["?"])[0], why)


def _find_unsupported_reason(model: ModelConfig, config: Any) -> str | None:
    if not model.is_generation:
        return "it does not generate text"
    if model.is_multimodal or model.hf_config is not config:
        return "it is multimodal"
    if model.attention_arch == AttentionArch.MLA:
        return MLA
    if why := find_reason_in_fields(lambda name: getattr(config, name, None)):
        return why
    if model.is_hybrid_swa:
        return WINDOW
    if model.has_attention_sinks:
        return "its attention has sinks"
    if model.quantization is not None:
        return f"its weights are quantised ({model.quantization})"
    return None


def refuse_graphs(args: AdaptiveServerArgs) -> None:
    """Raise ``ValueError`` where decode graphs cannot be; to be called once SGLang has decided on them."""
    if (option := adapter.arguments.find_refused_graphs(args)) is not None:
        raise ValueError(f"--adaptive-tp does not support {option}: its graphs are pieces that know one layout")
    on_cpu = adapter.arguments.get_fields(args)["device"] == "cpu"
    if args.pat_weights == "reshard" and not on_cpu and adapter.arguments.has_decode_graphs(args):
        raise ValueError(
            "--pat-weights reshard moves weights away from where CUDA graphs read them: "
            "add --disable-cuda-graph, or leave --pat-weights out"
        )


def _set_cpu_defaults(args: AdaptiveServerArgs) -> None:
    """Choose flags without which SGLang does not run on a CPU without AMX."""
    if is_cuda():
        return
    assign(args, device=args.device or "cpu")
    if args.device != "cpu":
        return
    if not cpu_has_amx_support() and args.attention_backend in (None, "intel_amx"):
        assign(args, attention_backend="torch_native")
    if args.grammar_backend in (None, "xgrammar"):
        # SGLang's default has no kernels for a CPU.
        assign(args, grammar_backend="llguidance")
    # It gains nothing where the "device" is the core that schedules, and a response's last step is made twice.
    assign(args, disable_overlap_schedule=not args.pat_cpu_overlap, disable_cuda_graph=True)
    # SGLang's schedulers poll; ranks may outnumber cores here.
    assign(args, sleep_on_idle=True)


def _set_mixture_defaults(args: AdaptiveServerArgs) -> None:
    """Turn off what SGLang chooses by itself for some mixtures of experts, and we refuse.

    That is a fused all-reduce on Hopper and Blackwell, and on Blackwell a kernel with its own order of experts.
    """
    assign(args, enforce_disable_flashinfer_allreduce_fusion=True)
    if args.moe_runner_backend == "auto":
        assign(args, moe_runner_backend="triton")


def drop_impossible_candidates(args: AdaptiveServerArgs) -> None:
    """Leave out of the default candidates what the model's sizes do not allow, and say so.

    Raises:
        ValueError: such a degree was asked for, or is the base layout's.
    """
    shape, config = read_model_shape(ModelConfig.from_server_args(args)), args.read_config()
    layouts = config.layouts if args.pat_candidates is not None else list_candidate_layouts(config.base)
    allowed = shape.list_allowed_degrees(layouts)
    if len(allowed) < len(layouts):
        first = layouts[len(allowed)].tp
        reason = f"tp={first} {shape.find_reason_against_degree(first)}"
        if args.pat_candidates is not None or not allowed:
            raise ValueError(f"{reason}; leave it out of --pat-candidates or choose other --tp/--dp")
        left = ", ".join(f"tp={layout.tp}" for layout in layouts[len(allowed) :])
        job_log.warning("not a candidate: %s (%s)", left, reason)
        chosen = ",".join(map(str, choose_default_degrees(allowed, config.only_ends)))
        adapter.arguments.decide(args, pat_candidates=chosen)
    if len(allowed) == 1:
        job_log.warning(
            "there is only one layout, %s, so nothing will switch: %d ranks allow no other candidate",
            layouts[0], layouts[0].num_ranks,
        )  # fmt: skip
