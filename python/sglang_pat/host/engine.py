"""SGLang's launch code for our engine: its ``Engine`` and its HTTP server.

It starts everything; only :meth:`LaunchedEngine._launch_scheduler_processes` differs: one coordinator and N ranks of
one world, instead of one world per replica.
"""

from __future__ import annotations

import copy
import ipaddress
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.entrypoints import engine as stock
from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
from sglang.srt.server_args import PortArgs
from sglang.srt.utils import MultiprocessingSerializer, maybe_reindex_device_id, numa_utils
from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

from sglang_pat.figures import job_log, start_line
from sglang_pat.host import adapter
from sglang_pat.host.arguments import AdaptiveServerArgs, prepare_start
from sglang_pat.host.assign import assign
from sglang_pat.host.shutdown import end_if_a_child_fails, make_watchdog
from sglang_pat.launch import processes
from sglang_pat.launch.processes import make_engine_folder, start
from sglang_pat.launch.refusals import refuse_function

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

# Whoever launches, verl among them: not all of them keep the watchdog that SGLang makes.
assign(stock, SubprocessWatchdog=make_watchdog)


class LaunchedEngine(stock.Engine):
    """The engine that the HTTP server and ``sglang_pat.Engine`` launch; a subclass says what its processes run.

    Attributes:
        programs: functions for a ``coordinator``, a ``rank`` and a ``detokenizer``.  All take SGLang's arguments and
            addresses; the coordinator also the addresses of the leaders, and that of the ranks' channel; a rank its
            number, its GPU, and the address of the channel.
    """

    server_args_class = AdaptiveServerArgs
    programs: dict[str, Callable[..., None]]

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
        started = {name: start(name, cls.programs["coordinator"], *arguments)}
        for rank in range(config.num_ranks):
            rank_ports = copy.copy(port_args)
            if rank in config.base.leaders:
                addresses = {"scheduler_input_ipc_name": leader_addresses[rank]}
                assign(rank_ports, rpc_ipc_name=f"ipc://{folder}/rpc{rank}", **addresses)
            # As SGLang starts its schedulers: one visible GPU each if so asked, bound to the GPU's NUMA node.
            with (
                maybe_reindex_device_id(spec.gpus[rank]) as gpu_id,
                saver.configure_subprocess(),
                numa_utils.configure_subprocess(server_args, gpu_id),
            ):
                name = f"rank {rank}"
                arguments = server_args, rank_ports, rank, gpu_id, channel_address
                started[name] = start(name, cls.programs["rank"], *arguments)
        children = [process for process, _ in started.values()]
        infos: list[dict[str, Any]] = []

        def wait_for_ready() -> None:
            infos.extend(processes.wait_until_ready(started)[1:])
            job_log.info(start_line(config))

        def join() -> None:
            for process in children:
                process.join()

        waits = {"wait_for_ready": wait_for_ready, adapter.engine.JOIN: join}
        pids = [process.pid for process in children]
        return stock.SchedulerInitResult(scheduler_infos=infos, all_child_pids=pids, **waits), children

    @classmethod
    def _launch_detokenizer_subprocesses(cls, server_args, port_args, run_detokenizer_process_func):
        """Start SGLang's detokenizer, of which there is one, from our process context.  Raises as above."""
        try:
            refuse_function("run_detokenizer_process_func", run_detokenizer_process_func)
        except ValueError:
            processes.end_children()  # ranks have been started by now
            raise
        process, _ = start("the detokenizer", cls.programs["detokenizer"], server_args, port_args)
        return [process], ["detokenizer"]

    def shutdown(self) -> None:
        """End all processes of the engine and wait until their memory is free.  A second call does nothing."""
        manager = self.tokenizer_manager
        if manager is not None and manager._subprocess_watchdog is not None:
            manager._subprocess_watchdog.stop()
        processes.end_children()

    async def async_update_weights_from_tensor(self, named_tensors: list[tuple[str, torch.Tensor]]) -> tuple[bool, str]:
        """Update the weights inside the event loop, with whole tensors, the same for all ranks."""
        tensors = [MultiprocessingSerializer.serialize(named_tensors) for _ in range(self.server_args.tp_size)]
        request = UpdateWeightsFromTensorReqInput(serialized_named_tensors=tensors)
        return await self.tokenizer_manager.update_weights_from_tensor(request, None)


def make_private_ports(args: AdaptiveServerArgs) -> PortArgs:
    """Choose SGLang's addresses, with sockets that no other user can reach."""
    folder = make_engine_folder()
    return adapter.engine.make_ports(
        str(folder),
        tokenizer_ipc_name=f"ipc://{folder}/tokenizer",
        scheduler_input_ipc_name=f"ipc://{folder}/scheduler",
        detokenizer_ipc_name=f"ipc://{folder}/detokenizer",
        nccl_port=args.nccl_port or 0,  # 0: rank 0 takes any
        rpc_ipc_name=f"ipc://{folder}/rpc",
        metrics_ipc_name=f"ipc://{folder}/metrics",
        tokenizer_worker_ipc_name=None,
    )


def serve(server_args: AdaptiveServerArgs, engine: type[LaunchedEngine], add_routes: Callable[[Any], None]) -> None:
    """Run SGLang's HTTP server in front of this engine, until a signal ends it.

    Raises:
        NotStarted: a process could not start.
    """
    from sglang.srt.entrypoints import http_server

    _warn_if_open(server_args)
    add_routes(http_server.app)
    # SGLang's launcher takes `Engine` from its module; ours starts the ranks differently.
    assign(http_server, Engine=engine)
    try:
        http_server.launch_server(
            server_args,
            init_tokenizer_manager_func=engine.init_tokenizer_manager_func,
            execute_warmup_func=_warm_up,
        )
    finally:
        state = http_server.get_global_state()
        if state is not None and state.tokenizer_manager._subprocess_watchdog is not None:
            state.tokenizer_manager._subprocess_watchdog.stop()


def _warn_if_open(args: AdaptiveServerArgs) -> None:
    """Warn if others than this machine's users can send requests without a key."""
    if args.api_key is None and not _is_loopback(args.host):
        logger.warning(
            "listening on %s without --api-key: whoever reaches port %d can use this server", args.host, args.port
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _warm_up(server_args: AdaptiveServerArgs) -> bool:
    """Warm up as SGLang does, with a request for each replica, which does not count in a decision log."""
    from sglang.srt.entrypoints import http_server

    manager = http_server.get_global_state().tokenizer_manager
    begins, manager.pat_log_begins = manager.pat_log_begins, False
    try:
        return adapter.engine.warm_up(server_args, server_args.spec.config.base.dp)
    finally:
        manager.pat_log_begins = begins
