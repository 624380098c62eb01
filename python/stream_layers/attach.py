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
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang_pat.host import adapter
from sglang_pat.memory.memory_plan import GIB
from sglang_pat.memory.shapes import ModelShape, read_config
from stream_layers import STREAM_VARIABLE
from stream_layers.judge_memory import CannotStream, JudgeMemory, order_layers, parse_count
from stream_layers.refusals import refuse_arguments

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
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

    from sglang_pat.launch.contract import check_sglang

    check_sglang()
    parse_count(os.environ[STREAM_VARIABLE], STREAM_VARIABLE)
    if _attached:
        return
    _attached = True
    adapter.streaming.hook_arguments(partial(refuse_arguments, more=adapter.streaming.REFUSED), CannotStream)
    setattr(model_runner, adapter.streaming.OFFLOADER, lambda *_, **__: make_offloader(adapter.streaming.read_engine()))
    loader._initialize_model = _then(loader._initialize_model, _find_layers)
    Scheduler.get_next_batch_to_run = _then(Scheduler.get_next_batch_to_run, _follow_memory)
    Scheduler.get_internal_state = _then(Scheduler.get_internal_state, _tell_resident_layers)
    for owner, names in adapter.streaming.TOUCH_WEIGHTS:
        for name in names:
            setattr(owner, name, _with_weights_in_host_memory(getattr(owner, name)))


def make_offloader(engine: Any) -> BaseOffloader:
    """Make the offloader of a rank before its model is built, in place of SGLang's own.

    Where memory does not suffice the engine ends, with one line.

    Args:
        engine: SGLang's arguments, and ``model_config``.
    """
    from stream_layers.layers import StreamedLayers

    layers = engine.model_config.num_hidden_layers
    count = parse_count(os.environ[STREAM_VARIABLE], STREAM_VARIABLE)
    if count is None:
        try:
            count = measure(engine).choose_count()
        except ValueError as error:
            logger.error("%s", error)
            os.kill(os.getppid(), signal.SIGQUIT)  # as SGLang's schedulers do, whose error is a traceback
            sys.exit(1)
    return StreamedLayers(order_layers(count, layers), count, engine.device)


def measure(engine: Any) -> JudgeMemory:
    """Memory that a rank of this engine has and needs, before its model is built.

    Raises:
        ValueError: the shape of the model is unknown.
    """
    import torch
    from sglang.srt.distributed import parallel_state
    from sglang.srt.utils import get_available_gpu_memory

    model, world = engine.model_config, parallel_state.get_world_group()
    gpu = torch.get_device_module(engine.device).current_device()
    # As SGLang counts what is free; the rank that has least, so that all choose alike.
    free = get_available_gpu_memory(engine.device, gpu, world.world_size > 1, cpu_group=world.cpu_group)
    shape = ModelShape.from_config(read_config(engine.model_path), str(model.dtype).removeprefix("torch."))
    tokens = engine.max_total_tokens or model.context_len * (engine.max_running_requests or 1)
    budget = int(free * GIB * float(engine.mem_fraction_static or 0))
    return JudgeMemory(shape=shape, tp=engine.tp_size, budget=budget, tokens=tokens)


def _then(method: Callable, follow: Callable) -> Callable:
    """The method, whose result and arguments ``follow`` gets."""

    @functools.wraps(method)
    def call(*args: Any, **named: Any) -> Any:
        result = method(*args, **named)
        follow(result, *args)
        return result

    return call


def _find_layers(model: Any, *_: Any) -> None:
    if (streamed := _get_streamed_layers()) is not None:
        streamed.find_layers(model)


def _with_weights_in_host_memory(method: Callable) -> Callable:
    @functools.wraps(method)
    def call(*args: Any, **named: Any) -> Any:
        streamed = _get_streamed_layers()
        with streamed.in_host_memory() if streamed is not None else nullcontext():
            return method(*args, **named)

    return call


def _follow_memory(result: Any, scheduler: Scheduler, *_: Any) -> None:
    if not hasattr(scheduler, "pat_follower"):
        scheduler.pat_follower = make_follower(scheduler)
    if scheduler.pat_follower is not None:
        scheduler.pat_follower.turn(adapter.streaming.get_batch(result) is not None)


def make_follower(scheduler: Scheduler) -> Follower | None:
    """None where the number of layers is given, or where another owns the memory of weights or the turns of ranks."""
    from stream_layers.follow import Follower

    streamed, engine = _get_streamed_layers(), adapter.streaming.read_engine()
    fixed = parse_count(os.environ[STREAM_VARIABLE], STREAM_VARIABLE) is not None
    if streamed is None or fixed or not streamed.can_change or engine.enable_memory_saver or engine.enable_dp_attention:
        return None
    group = scheduler.tp_cpu_group if scheduler.tp_size > 1 else None
    return Follower(scheduler.tp_worker.model_runner, streamed, group)


def _tell_resident_layers(output: Any, *_: Any) -> None:
    if (streamed := _get_streamed_layers()) is not None:
        output.internal_state["resident_layers"] = streamed.total - streamed.count


def _get_streamed_layers() -> StreamedLayers | None:
    """Streamed layers of this rank's model; None in a process without one."""
    from sglang.srt.utils.offloader import get_offloader

    from stream_layers.layers import StreamedLayers

    offloader = get_offloader()
    return offloader if isinstance(offloader, StreamedLayers) else None
