"""A plain engine that streams layers (``stream_layers``): its model runner updates weights by itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.server_args import ServerArgs, get_global_server_args

from sglang_pat.errors import format_one_line
from sglang_pat.host.assign import assign

OFFLOADER = "create_offloader_from_server_args"
"""Function of the module ``model_runner`` that makes the offloader of a rank."""

TOUCH_WEIGHTS = (
    (
        ModelRunner,
        (
            "update_weights_from_disk", "update_weights_from_distributed", "update_weights_from_tensor",
            "update_weights_from_ipc", "get_weights_by_name", "check_weights", "save_remote_model",
            "save_sharded_model", "send_weights_to_remote_instance",
        ),
    ),
)  # fmt: skip
"""Classes, and methods that read or write parameters outside a step."""

_EMPTY = (None, False)
REFUSED = (
    ("torchao_config", (*_EMPTY, ""), "give an unquantised model"),
    ("enforce_piecewise_cuda_graph", _EMPTY, "leave it out: these graphs know nothing of the waits for layers"),
    ("enable_breakable_cuda_graph", _EMPTY, "leave it out: these graphs know nothing of the waits for layers"),
)
"""Arguments that other versions lack, with the values that are allowed, and what to do otherwise."""


def hook_arguments(refuse: Callable[[Any], None], error: type[Exception]) -> None:
    """Have SGLang's arguments go through ``refuse`` where SGLang checks them; raise what it refuses as ``error``."""
    check = ServerArgs.check_server_args

    @functools.wraps(check)
    def check_and_adapt(args: ServerArgs) -> None:
        refuse(args)
        # SGLang's graphs for prefill are compiled pieces of the model, without the hooks that order the copies.
        assign(args, disable_piecewise_cuda_graph=True)
        assign(args, sleep_on_idle=True)  # the actor needs the CPU; an idle judge looks at its memory once a second
        try:
            check(args)
        except (AssertionError, ValueError) as failure:
            raise error(format_one_line(failure)) from failure

    assign(ServerArgs, check_server_args=check_and_adapt)


def read_engine() -> Any:
    """Arguments of the engine that this process is a rank of, and ``model_config``."""
    args = get_global_server_args()
    return SimpleNamespace(**vars(args) | {"model_config": args.get_model_config()})


def get_batch(step: Any) -> Any:
    """The batch in what the scheduler has chosen as its next step."""
    return step
