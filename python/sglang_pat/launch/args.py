"""Server arguments: SGLang's own plus ``--adaptive-tp`` and the ``--pat-*`` flags.

Built on SGLang's fork point ``Engine.server_args_class``.  What the user writes
(``--tp 1 --dp 2``) is the base layout.  The TokenizerManager, HTTP clients and RL frameworks
see one engine of ``tp * dp`` ranks (:func:`outer_view`), each rank's scheduler one replica of
the base layout (:func:`rank_view`).
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils import cpu_has_amx_support, is_cuda

from sglang_pat.config import AdaptiveConfig
from sglang_pat.errors import one_line
from sglang_pat.figures import job_log
from sglang_pat.launch.early import check_model_path, check_second_port
from sglang_pat.launch.flags import refuse_flags
from sglang_pat.launch.spec import EngineSpec
from sglang_pat.launch.supported import refuse_model
from sglang_pat.layout import ParallelLayout, candidate_layouts, default_degrees
from sglang_pat.memory.shapes import ModelShape
from sglang_pat.settings import SETTINGS, configuration

_DEFAULT: dict[str, Any] = {setting.field: setting.default for setting in SETTINGS}


@dataclasses.dataclass
class AdaptiveServerArgs(ServerArgs):
    """SGLang's ``ServerArgs`` with the adaptive engine's fields (all plain values)."""

    adaptive_tp: bool = False
    pat_candidates: str | None = _DEFAULT["pat_candidates"]
    pat_policy: str | None = _DEFAULT["pat_policy"]
    pat_schedule: str | None = _DEFAULT["pat_schedule"]
    pat_switch_at: int = _DEFAULT["pat_switch_at"]
    pat_weights: str = _DEFAULT["pat_weights"]
    pat_kv: str = _DEFAULT["pat_kv"]
    pat_kv_exchange: str = _DEFAULT["pat_kv_exchange"]
    pat_profile: str | None = _DEFAULT["pat_profile"]
    pat_profile_as_is: bool = _DEFAULT["pat_profile_as_is"]
    pat_calibrate: int = _DEFAULT["pat_calibrate"]
    pat_log: str | None = _DEFAULT["pat_log"]
    pat_cpu_overlap: bool = _DEFAULT["pat_cpu_overlap"]
    pat_gpu_order: str = _DEFAULT["pat_gpu_order"]
    pat_fraction_given: bool = False
    """Set here: ``mem_fraction_static`` is the user's, not SGLang's default."""
    pat_in_a_job: bool = False
    """Set by ``attach``: a framework has launched it, whose log shows nothing below an error but our lines for it."""
    pat_graphs_given: bool = False
    """Set here: so is ``cuda_graph_bs``."""

    _spec = None  # no field: SGLang shows these to clients

    def __post_init__(self) -> None:
        if self.adaptive_tp:
            self.pat_fraction_given = self.mem_fraction_static is not None
            self.pat_graphs_given = self.cuda_graph_bs is not None
            # Before SGLang's own handling, which turns some of these into other errors.
            refuse_flags(self)
            self.read_config()
            _cpu_defaults(self)
            self.disable_piecewise_cuda_graph = True
            check_model_path(self.model_path)
            check_second_port(self.port)
        try:
            super().__post_init__()
        except OSError as error:  # as transformers says that there is no such model, in several lines
            raise ValueError(f"--model-path {self.model_path}: {one_line(error)}") from None
        if self.adaptive_tp:
            refuse_model(ModelConfig.from_server_args(self))
            # Again: SGLang has chosen what was left open.
            refuse_flags(self)
            refuse_graphs(self)
            settle_candidates(self)

    @staticmethod
    def add_cli_args(parser) -> None:
        ServerArgs.add_cli_args(parser)
        group = parser.add_argument_group("adaptive tensor parallelism (sglang_pat)")
        parser.set_defaults(
            pat_fraction_given=False,
            pat_in_a_job=False,
            pat_graphs_given=False,
        )
        group.add_argument("--adaptive-tp", action="store_true", help="merge replicas as the batch drains")
        for setting in SETTINGS:
            kind = {"action": "store_true"} if setting.default is False else {"type": type(setting.default or "")}
            if setting.default is not False:
                kind["metavar"] = setting.value
            about = f"{setting.help} Default: {setting.shown_default}."
            group.add_argument(setting.flag, default=setting.default, help=about, **kind)

    @property
    def resolved(self) -> bool:
        return self._spec is not None

    @property
    def spec(self) -> EngineSpec:
        """What the engine is; there from :func:`sglang_pat.launch.start.ready` on, in all its processes."""
        assert self._spec is not None, "not resolved"
        return self._spec

    def read_config(self) -> AdaptiveConfig:
        """What the settings say, for what comes before :attr:`spec`.

        Raises:
            ValueError: an impossible layout, candidate or mode.
        """
        base = ParallelLayout(self.tp_size, self.dp_size)
        return configuration(vars(self), base, self.max_running_requests)


def refuse_graphs(args: AdaptiveServerArgs) -> None:
    """Raise ``ValueError`` where decode graphs cannot be; to be called once SGLang has decided on them."""
    if args.pat_weights == "reshard" and args.device != "cpu" and not args.disable_cuda_graph:
        raise ValueError(
            "--pat-weights reshard moves weights away from where CUDA graphs read them: "
            "add --disable-cuda-graph, or leave --pat-weights out"
        )


def _cpu_defaults(args: AdaptiveServerArgs) -> None:
    """Choices without which SGLang does not run on a CPU without AMX."""
    if is_cuda():
        return
    args.device = args.device or "cpu"
    if args.device != "cpu":
        return
    if not cpu_has_amx_support() and args.attention_backend in (None, "intel_amx"):
        args.attention_backend = "torch_native"
    if args.grammar_backend in (None, "xgrammar"):
        # SGLang's default has no kernels for a CPU.
        args.grammar_backend = "llguidance"
    # It gains nothing where the "device" is the core that schedules, and a response's last step is made twice.
    args.disable_overlap_schedule = not args.pat_cpu_overlap
    args.disable_cuda_graph = True
    # SGLang's schedulers poll; ranks may outnumber cores here.
    args.sleep_on_idle = True


def model_shape(model: ModelConfig) -> ModelShape:
    """SGLang's view of a model as sizes."""
    shape = ModelShape.from_config(model.hf_text_config.to_dict(), str(model.dtype).removeprefix("torch."))
    return dataclasses.replace(shape, context=model.context_len)


def settle_candidates(args: AdaptiveServerArgs) -> None:
    """Leave out of the default candidates what the model's sizes do not allow, and say so.

    Raises:
        ValueError: such a degree was asked for, or is the base layout's.
    """
    shape, config = model_shape(ModelConfig.from_server_args(args)), args.read_config()
    layouts = config.layouts if args.pat_candidates is not None else candidate_layouts(config.base)
    allowed = shape.allowed(layouts)
    if len(allowed) < len(layouts):
        first = layouts[len(allowed)].tp
        reason = f"tp={first} {shape.why_not(first)}"
        if args.pat_candidates is not None or not allowed:
            raise ValueError(f"{reason}; leave it out of --pat-candidates or choose other --tp/--dp")
        left = ", ".join(f"tp={layout.tp}" for layout in layouts[len(allowed) :])
        job_log.warning("not a candidate: %s (%s)", left, reason)
        args.pat_candidates = ",".join(map(str, default_degrees(allowed, config.only_ends)))
    if len(allowed) == 1:
        job_log.warning(
            "there is only one layout, %s, so nothing will switch: %d ranks allow no other candidate",
            layouts[0], layouts[0].num_ranks,
        )  # fmt: skip


def outer_view(args: AdaptiveServerArgs, spec: EngineSpec) -> AdaptiveServerArgs:
    """``args`` as one engine of N ranks: what the TokenizerManager and ``/server_info`` show.

    With ``dp_size == 1`` SGLang's control calls expect one reply, whatever the layout.
    """
    view = copy.copy(args)
    view._spec = spec
    view.tp_size, view.dp_size = spec.config.num_ranks, 1
    return view


def rank_view(args: AdaptiveServerArgs) -> AdaptiveServerArgs:
    """``args`` as one replica of the base layout: what each rank's scheduler is built with."""
    view = copy.copy(args)
    view.tp_size, view.dp_size = args.spec.config.base.tp, 1
    return view
