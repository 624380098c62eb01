"""SGLang's ``Engine`` on N ranks that change their layout.

SGLang's launch code starts everything; only :meth:`Engine._launch_scheduler_processes` differs:
one coordinator and N ranks of one world, instead of one world per replica.
"""

from __future__ import annotations

import asyncio
import multiprocessing as mp
from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING, Any

from sglang_pat.cpu import shim
from sglang_pat.launch import processes

shim.ensure(children=True)
if mp.parent_process() is None:  # not in a child that only looks something up here
    processes.warm_up_fork_server()

from sglang.srt.entrypoints import engine as stock  # noqa: E402
from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput  # noqa: E402
from sglang.srt.server_args import PortArgs  # noqa: E402
from sglang.srt.utils import MultiprocessingSerializer, maybe_reindex_device_id, numa_utils  # noqa: E402
from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter  # noqa: E402

from sglang_pat import files, removed  # noqa: E402
from sglang_pat.coordinator.process import run_coordinator  # noqa: E402
from sglang_pat.figures import job_log, start_line  # noqa: E402
from sglang_pat.host.process import run_detokenizer, run_rank  # noqa: E402
from sglang_pat.launch.processes import make_engine_folder, start  # noqa: E402
from sglang_pat.launch.refusals import refuse_function  # noqa: E402
from sglang_pat.launch.spec import AdaptiveServerArgs, make_fingerprint, prepare_start  # noqa: E402
from sglang_pat.layout import ParallelLayout  # noqa: E402
from sglang_pat.messages import BeginRound, EndRound  # noqa: E402
from sglang_pat.policies.lending import Training  # noqa: E402
from sglang_pat.predict.profile import Fingerprint  # noqa: E402
from sglang_pat.rollout.loop import EngineLoop  # noqa: E402
from sglang_pat.server.rollout import EngineRollouts  # noqa: E402
from sglang_pat.server.shutdown import end_if_a_child_fails, make_watchdog  # noqa: E402
from sglang_pat.server.tokenizer import ReconfigureError, init_adaptive_tokenizer_manager  # noqa: E402

if TYPE_CHECKING:
    import torch

# Whoever launches, verl among them: not all of them keep the watchdog that SGLang makes.
stock.SubprocessWatchdog = make_watchdog

__all__ = ["Engine", "ReconfigureError"]


class AdaptiveEngine(stock.Engine):
    """What the HTTP server and :class:`Engine` launch."""

    server_args_class = AdaptiveServerArgs
    init_tokenizer_manager_func = staticmethod(init_adaptive_tokenizer_manager)

    @classmethod
    def _launch_subprocesses(cls, server_args: AdaptiveServerArgs, *args: Any, **kwargs: Any):
        args_ready = prepare_start(server_args)
        if kwargs.get("port_args") is None:
            kwargs["port_args"] = make_private_ports(args_ready)
        return super()._launch_subprocesses(args_ready, *args, **kwargs)

    @classmethod
    def _launch_scheduler_processes(
        cls, server_args: AdaptiveServerArgs, port_args: PortArgs, run_scheduler_process_func: Callable
    ):
        """Start the coordinator and the ranks; all are children of this process.

        Raises:
            ValueError: the launcher has a function of its own for ranks.
        """
        refuse_function("run_scheduler_process_func", run_scheduler_process_func)
        if server_args.custom_sigquit_handler is None:
            end_if_a_child_fails()
        spec = server_args.spec
        config = spec.config
        folder = make_engine_folder()
        leader_addresses = [f"ipc://{folder}/leader{rank}" for rank in config.base.leaders]
        channel_address = f"ipc://{folder}/channel"
        saver = TorchMemorySaverAdapter.create(enable=server_args.enable_memory_saver)
        name = "the coordinator"
        arguments = server_args, port_args, leader_addresses, channel_address
        started = {name: start(name, run_coordinator, *arguments)}
        for rank in range(config.num_ranks):
            rank_ports = copy(port_args)
            if rank in config.base.leaders:
                rank_ports.scheduler_input_ipc_name = leader_addresses[rank]
                rank_ports.rpc_ipc_name = f"ipc://{folder}/rpc{rank}"
            # As SGLang starts its schedulers: one visible GPU each if so asked, bound to the GPU's NUMA node.
            with (
                maybe_reindex_device_id(spec.gpus[rank]) as gpu_id,
                saver.configure_subprocess(),
                numa_utils.configure_subprocess(server_args, gpu_id),
            ):
                name = f"rank {rank}"
                arguments = server_args, rank_ports, rank, gpu_id, channel_address
                started[name] = start(name, run_rank, *arguments)
        children = [process for process, _ in started.values()]
        infos: list[dict[str, Any]] = []

        def wait_for_ready() -> None:
            infos.extend(processes.wait_until_ready(started)[1:])
            job_log.info(start_line(config))

        def wait_for_completion() -> None:
            for process in children:
                process.join()

        result = stock.SchedulerInitResult(
            scheduler_infos=infos,
            all_child_pids=[process.pid for process in children],
            wait_for_ready=wait_for_ready,
            wait_for_completion=wait_for_completion,
        )
        return result, children

    @classmethod
    def _launch_detokenizer_subprocesses(cls, server_args, port_args, run_detokenizer_process_func):
        """SGLang's, from our process context; ``detokenizer_worker_num`` is 1 here.  Raises as the one above."""
        try:
            refuse_function("run_detokenizer_process_func", run_detokenizer_process_func)
        except ValueError:
            processes.end_children()  # ranks have been started by now
            raise
        process, _ = start("the detokenizer", run_detokenizer, server_args, port_args)
        return [process], ["detokenizer"]

    def shutdown(self) -> None:
        """End all processes of the engine and wait for them: their memory can be used again.  Twice is once."""
        manager = self.tokenizer_manager
        if manager is not None and manager._subprocess_watchdog is not None:
            manager._subprocess_watchdog.stop()
        processes.end_children()


def make_private_ports(args: AdaptiveServerArgs) -> PortArgs:
    """SGLang's addresses, with sockets that no other user can reach."""
    folder = make_engine_folder()
    return PortArgs(
        tokenizer_ipc_name=f"ipc://{folder}/tokenizer",
        scheduler_input_ipc_name=f"ipc://{folder}/scheduler",
        detokenizer_ipc_name=f"ipc://{folder}/detokenizer",
        nccl_port=args.nccl_port or 0,  # 0: rank 0 takes any
        rpc_ipc_name=f"ipc://{folder}/rpc",
        metrics_ipc_name=f"ipc://{folder}/metrics",
        tokenizer_worker_ipc_name=None,
    )


class Engine(EngineRollouts, AdaptiveEngine):
    """SGLang's ``Engine``, offline API included, plus ``layout``, ``reconfigure``, ``status`` and ``rollout``.

    ``Engine(model_path=..., tp_size=1, dp_size=2, adaptive_tp=True, ...)``; without ``adaptive_tp`` use
    SGLang's own.

    Raises:
        ValueError: from the constructor, for what the adaptive engine does not support, or could not start; one
            line that says what was given and what to change.
    """

    def __init__(self, **kwargs: Any) -> None:
        if "server_args" not in kwargs and not kwargs.get("adaptive_tp"):
            raise ValueError("sglang_pat.Engine needs adaptive_tp=True; for a static layout use sglang.Engine")
        removed.refuse_flags(kwargs)
        super().__init__(**kwargs)
        # SGLang keeps the arguments as given; show it the engine as it is: N ranks.
        self.server_args = self.tokenizer_manager.server_args
        if not self.loop.is_running():  # else it is the caller's; SGLang has just made this one, and not used it
            self.loop.close()
            self.loop = EngineLoop()
            asyncio.set_event_loop(self.loop)

    def __getattr__(self, name: str) -> Any:
        if name in removed.METHODS:
            raise AttributeError(f"Engine.{name} is gone: {removed.METHODS[name]}")
        return self.__getattribute__(name)  # raises what it did

    def shutdown(self) -> None:
        """As :meth:`AdaptiveEngine.shutdown`; a rollout that is under way ends with an error."""
        super().shutdown()
        if isinstance(getattr(self, "loop", None), EngineLoop):
            self.loop.end()

    def _await(self, coroutine: Any) -> Any:
        if self.loop.is_running() and not isinstance(self.loop, EngineLoop):
            return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()
        return self.loop.run_until_complete(coroutine)

    @property
    def layout(self) -> ParallelLayout:
        """The layout in force."""
        return ParallelLayout(**self.status()["layout"])

    def status(self) -> dict[str, Any]:
        """What ``GET /pat/status`` returns.  Loads are as last reported: a request may be in them after its answer."""
        return self._await(self.tokenizer_manager.pat_status())

    def reconfigure(self, tp: int, dry_run: bool = False) -> dict[str, Any]:
        """Switch to degree ``tp`` now; returns the switch record, times in seconds (empty if already there).

        ``dry_run``: only says what that would do, as :func:`sglang_pat.coordinator.replicas.forecast_switch` does.

        Raises:
            ReconfigureError: not a candidate, a switch under way, or aborted.
        """
        return self._await(self.tokenizer_manager.pat_reconfigure(tp, dry_run))

    def lend_ranks(self, stride: int = 2) -> dict[str, Any]:
        """Go on with the first of every ``stride`` ranks, and lend the others; returns the record of the switch (empty
        if it is so already), whose ``lent`` names them.

        Their requests go on at the rank before them.  The others still change their degree, up to N / ``stride``.
        They have no lease, as they would have over HTTP: the engine ends with this process.

        Raises:
            ReconfigureError: not with this stride (400), a switch is under way or memory is released (409), or aborted
                (500).
        """
        return self._await(self.tokenizer_manager.pat_lend_ranks(stride))

    def take_back_ranks(self) -> dict[str, Any]:
        """Go on with all ranks; returns the record of the switch (empty if none is lent).  Raises as
        :meth:`lend_ranks`."""
        return self._await(self.tokenizer_manager.pat_lend_ranks(1))

    def decide_lending(self, **about: Any) -> dict[str, Any]:
        """Whether ranks should be lent now, or taken back; to be asked whenever a group is complete.

        Returns the fields of a :class:`~sglang_pat.policies.lending.LendingDecision`: ``move`` is ``lend``, ``wait``,
        ``never`` or ``take_back``.

        Args:
            about: fields of :class:`~sglang_pat.policies.lending.Training`.

        Raises:
            ValueError: a field that cannot be, one line with its name.
        """
        return self._await(self.async_decide_lending(**about))

    def trace(self) -> list[dict[str, Any]]:
        """Steps of all replicas since the last call, oldest first (the last 16,384 of each rank).

        Each has ``rank`` (the replica's leader), ``tp``, ``kind`` (``decode`` or ``prefill``), ``at`` (when it ended,
        seconds of the machine's monotonic clock), ``seconds``, ``requests`` and ``tokens`` (context tokens of a
        decode step's batch, or tokens prefilled).
        """
        return self._await(self.tokenizer_manager.pat_get_trace())

    def inject_prefixes(self, prompts: list[list[int]]) -> None:
        """Make every replica believe that it has the KV of ``prompts`` (token ids), without computing it.

        For measurements only (PAT section 4.2): step times do not depend on what is in the KV, but the answers to
        such prompts mean nothing until ``flush_cache()``.  A switch forgets them.
        """
        self._run_in_loop(lambda: self.tokenizer_manager.pat_inject_prefixes(prompts))

    def begin_round(self, requests: int | None = None, **about: Any) -> None:
        """A round of ``requests`` samples begins, for what is generated from now on; until :meth:`end_round`.

        Args:
            about: other fields of :class:`~sglang_pat.messages.BeginRound`.

        Raises:
            ValueError: a field that cannot be, one line with its name.
        """
        removed.refuse_fields("round", about)
        begun = files.convert({"requests": requests, **about}, BeginRound)
        self._run_in_loop(lambda: self.tokenizer_manager.pat_send_round(begun))

    def end_round(self, name: str = "default") -> None:
        """The round of this name is over; nothing happens if there is none."""
        self._run_in_loop(lambda: self.tokenizer_manager.pat_send_round(EndRound(name=name)))

    def _run_in_loop(self, tell: Callable[[], None]) -> None:
        """Sockets are the loop's: only who runs it may use them."""

        async def told() -> None:
            tell()

        if asyncio._get_running_loop() is self.loop:
            tell()
        else:
            self._await(told())

    def get_fingerprint(self) -> Fingerprint:
        """What a profile taken on this engine holds for."""
        info, args = self._scheduler_init_result.scheduler_infos[0], self.server_args
        return make_fingerprint(args, args.spec.config, info["max_total_num_tokens"], info["pat_max_running"])

    async def async_update_weights_from_tensor(self, named_tensors: list[tuple[str, torch.Tensor]]) -> tuple[bool, str]:
        """SGLang's ``update_weights_from_tensor``, inside the event loop; whole tensors, the same for all ranks."""
        tensors = [MultiprocessingSerializer.serialize(named_tensors) for _ in range(self.server_args.tp_size)]
        request = UpdateWeightsFromTensorReqInput(serialized_named_tensors=tensors)
        return await self.tokenizer_manager.update_weights_from_tensor(request, None)

    async def async_trace(self) -> list[dict[str, Any]]:
        return await self.tokenizer_manager.pat_get_trace()

    async def async_status(self) -> dict[str, Any]:
        return await self.tokenizer_manager.pat_status()

    async def async_lend_ranks(self, stride: int = 2) -> dict[str, Any]:
        return await self.tokenizer_manager.pat_lend_ranks(stride)

    async def async_take_back_ranks(self) -> dict[str, Any]:
        return await self.tokenizer_manager.pat_lend_ranks(1)

    async def async_decide_lending(self, **about: Any) -> dict[str, Any]:
        return await self.tokenizer_manager.pat_decide_lending(files.convert(about, Training))

    async def async_reconfigure(self, tp: int, dry_run: bool = False) -> dict[str, Any]:
        return await self.tokenizer_manager.pat_reconfigure(tp, dry_run)
