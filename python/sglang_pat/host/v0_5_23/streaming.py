"""A plain engine that streams layers (``stream_layers``): its model runner has components that touch the weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.model_runner_components.weight_exporter import WeightExporter
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.runtime_context import get_parallel, get_server_args, process_model_config
from sglang.srt.server_args import ServerArgs

from sglang_pat.errors import format_one_line
from sglang_pat.host.assign import assign
from sglang_pat.host.v0_5_23 import arguments

OFFLOADER = "create_offloader"
"""Function of the module ``model_runner`` that makes the offloader of a rank."""

TOUCH_WEIGHTS = (
    (
        WeightUpdater,
        (
            "update_weights_from_disk", "load_weights_from_distributed", "update_weights_from_tensor",
            "update_weights_from_ipc", "begin_weight_update", "end_weight_update",
        ),
    ),
    (
        WeightExporter,
        ("get_weights_by_name", "save_remote_model", "save_sharded_model", "send_weights_to_remote_instance"),
    ),
    (ModelRunner, ("check_weights",)),
)  # fmt: skip
"""Classes, and methods that read or write parameters outside a step."""

REFUSED = (
    ("cuda_graph_backend_decode", (None, "full", "disabled"), "these graphs know nothing of the waits for layers"),
    ("debug_cuda_graph", (False,), "leave it out: these graphs know nothing of the waits for layers"),
)
"""Arguments that other versions lack, with the values that are allowed, and what to do otherwise."""


def hook_arguments(refuse: Callable[[Any], None], error: type[Exception]) -> None:
    """Have SGLang's arguments go through ``refuse`` once they are decided; raise what SGLang refuses as ``error``."""
    resolve = ServerArgs.resolve_once

    @functools.wraps(resolve)
    def resolve_and_adapt(args: Any) -> None:
        if not getattr(args, "_resolution_finished", False):
            arguments.disable_prefill_graphs(args)  # they are without the hooks that order the copies
            assign(args, sleep_on_idle=True)  # the actor needs the CPU, and an idle judge looks at its memory
        try:
            resolve(args)
        except (AssertionError, ValueError) as failure:
            raise error(format_one_line(failure)) from failure
        refuse(SimpleNamespace(**arguments.get_fields(args)))

    assign(ServerArgs, resolve_once=resolve_and_adapt)


def read_engine() -> Any:
    """Arguments of the engine that this process is a rank of, and ``model_config``."""
    more = {"model_config": process_model_config(), "enable_dp_attention": get_parallel().attn_dp_enabled}
    return SimpleNamespace(**arguments.get_fields(get_server_args()) | more)


def get_batch(step: Any) -> Any:
    """The batch in what the scheduler has chosen as its next step."""
    return step.batch_to_run
