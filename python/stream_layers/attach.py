"""Plain engines that stream layers, wherever somebody launches SGLang: ``--stream-layers``, verl's reward models.

Every process of an engine loads SGLang's plug-ins, and ours (:mod:`sglang_pat.plugin`) reads the variable
:data:`~stream_layers.STREAM_VARIABLE`.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from sglang_pat.errors import format_one_line
from sglang_pat.memory.plan import GIB
from sglang_pat.memory.shapes import ModelShape, read_config
from stream_layers import STREAM_VARIABLE
from stream_layers.plan import CannotStream, JudgeMemory, order_layers, parse_count
from stream_layers.refusals import refuse_arguments

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils.offloader import BaseOffloader

    from stream_layers.follow import Follower
    from stream_layers.layers import StreamedLayers

logger = logging.getLogger(__name__)
_attached = False


def attach() -> None:
    """Have the engines of this process stream layers, as :data:`~stream_layers.STREAM_VARIABLE` says.  Idempotent.

    Raises:
        SGLangMismatch: another SGLang.
        CannotStream: a wrong value; one line.
    """
    global _attached
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor import model_runner
    from sglang.srt.model_loader import loader
    from sglang.srt.server_args import ServerArgs

    from sglang_pat.launch.contract import check_sglang

    check_sglang()
    parse_count(os.environ[STREAM_VARIABLE], STREAM_VARIABLE)
    if _attached:
        return
    _attached = True
    check = ServerArgs.check_server_args

    def check_and_adapt(args: ServerArgs) -> None:
        refuse_arguments(args)
        # SGLang's graphs for prefill are compiled pieces of the model, without the hooks that order the copies.
        args.disable_piecewise_cuda_graph = True
        args.sleep_on_idle = True  # the actor needs the CPU; and an idle judge looks at its memory once a second
        try:
            check(args)
        except (AssertionError, ValueError) as error:
            raise CannotStream(format_one_line(error)) from error

    ServerArgs.check_server_args = functools.wraps(check)(check_and_adapt)
    model_runner.create_offloader_from_server_args = make_offloader
    loader._initialize_model = _with_layers_found(loader._initialize_model)
    Scheduler.get_next_batch_to_run = _with_memory_followed(Scheduler.get_next_batch_to_run)
    Scheduler.get_internal_state = _with_resident_layers(Scheduler.get_internal_state)
    runner = model_runner.ModelRunner
    for name in TOUCH_WEIGHTS:
        setattr(runner, name, _with_weights_in_host_memory(getattr(runner, name)))


TOUCH_WEIGHTS = (
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "get_weights_by_name",
    "check_weights",
    "save_remote_model",
    "save_sharded_model",
    "send_weights_to_remote_instance",
)
"""Methods of SGLang's ``ModelRunner`` that read or write parameters outside a step."""


def make_offloader(args: ServerArgs, dp_rank: int | None) -> BaseOffloader:
    """Make the offloader of a rank before its model is built; replaces SGLang's ``create_offloader_from_server_args``.

    Where memory does not suffice the engine ends, with one line.
    """
    from stream_layers.layers import StreamedLayers

    layers = args.get_model_config().num_hidden_layers
    count = parse_count(os.environ[STREAM_VARIABLE], STREAM_VARIABLE)
    if count is None:
        try:
            count = measure(args).choose_count()
        except ValueError as error:
            logger.error("%s", error)
            os.kill(os.getppid(), signal.SIGQUIT)  # as SGLang's schedulers do, whose error is a traceback
            sys.exit(1)
    return StreamedLayers(order_layers(count, layers), count, args.device)


def measure(args: ServerArgs) -> JudgeMemory:
    """Memory that a rank of this engine has and needs, before its model is built.

    Raises:
        ValueError: the shape of the model is unknown.
    """
    import torch
    from sglang.srt.distributed import get_world_group
    from sglang.srt.utils import get_available_gpu_memory

    model, world = args.get_model_config(), get_world_group()
    gpu = torch.get_device_module(args.device).current_device()
    # As SGLang counts what is free; the rank that has least, so that all choose alike.
    free = get_available_gpu_memory(args.device, gpu, world.world_size > 1, cpu_group=world.cpu_group)
    shape = ModelShape.from_config(read_config(args.model_path), str(model.dtype).removeprefix("torch."))
    tokens = args.max_total_tokens or model.context_len * (args.max_running_requests or 1)
    budget = int(free * GIB * float(args.mem_fraction_static or 0))
    return JudgeMemory(shape=shape, tp=args.tp_size, budget=budget, tokens=tokens)


def _with_layers_found(initialize: Callable) -> Callable:
    @functools.wraps(initialize)
    def call(*args: Any, **named: Any) -> Any:
        model = initialize(*args, **named)
        if (streamed := _get_streamed_layers()) is not None:
            streamed.find_layers(model)
        return model

    return call


def _with_weights_in_host_memory(method: Callable) -> Callable:
    @functools.wraps(method)
    def call(*args: Any, **named: Any) -> Any:
        streamed = _get_streamed_layers()
        with streamed.in_host_memory() if streamed is not None else nullcontext():
            return method(*args, **named)

    return call


def _with_memory_followed(choose: Callable) -> Callable:
    @functools.wraps(choose)
    def call(scheduler: Scheduler) -> Any:
        batch = choose(scheduler)
        if not hasattr(scheduler, "pat_follower"):
            scheduler.pat_follower = make_follower(scheduler)
        if scheduler.pat_follower is not None:
            scheduler.pat_follower.turn(batch is not None)
        return batch

    return call


def make_follower(scheduler: Scheduler) -> Follower | None:
    """None where the number of layers is given, or where another owns the memory of weights or the turns of ranks."""
    from stream_layers.follow import Follower

    streamed, args = _get_streamed_layers(), scheduler.server_args
    given = parse_count(os.environ[STREAM_VARIABLE], STREAM_VARIABLE) is not None
    if streamed is None or given or not streamed.can_change or args.enable_memory_saver or args.enable_dp_attention:
        return None
    return Follower(scheduler.tp_worker.model_runner, streamed, scheduler.tp_cpu_group)


def _with_resident_layers(tell: Callable) -> Callable:
    @functools.wraps(tell)
    def call(scheduler: Scheduler, request: Any) -> Any:
        output = tell(scheduler, request)
        if (streamed := _get_streamed_layers()) is not None:
            output.internal_state["resident_layers"] = streamed.total - streamed.count
        return output

    return call


def _get_streamed_layers() -> StreamedLayers | None:
    """Streamed layers of this rank's model; None in a process without one."""
    from sglang.srt.utils.offloader import get_offloader

    from stream_layers.layers import StreamedLayers

    found = get_offloader()
    return found if isinstance(found, StreamedLayers) else None
