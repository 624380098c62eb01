"""SGLang's launch code: what it is given, and what it is told of our processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.entrypoints.engine import SchedulerInitResult
from sglang.srt.server_args import PortArgs

from sglang_pat.host.arguments import AdaptiveServerArgs
from sglang_pat.host.assign import assigned


def make_ports(identity: str, **addresses: Any) -> PortArgs:
    """SGLang's addresses; ``identity`` names the engine."""
    return PortArgs(**addresses, decoupled_spec_ipc_config=None, instance_id=identity)


def make_result(
    infos: list[dict[str, Any]], pids: list[int], wait_for_ready: Callable[[], None], join: Callable[[], None]
) -> SchedulerInitResult:
    """What SGLang's launcher is told of schedulers: what each says at its start, and functions that wait for them."""
    return SchedulerInitResult(
        scheduler_infos=infos, all_child_pids=pids, wait_for_ready=wait_for_ready, block_until_scheduler_exits=join
    )


def warm_up(args: AdaptiveServerArgs, replicas: int) -> bool:
    """Warm up as SGLang's server does, with a request for each replica."""
    from sglang.srt.entrypoints import http_server

    parallel = _Parallel(http_server.get_parallel(), replicas)
    with assigned(http_server, get_parallel=lambda: parallel):
        return http_server._execute_server_warmup(args)


class _Parallel:
    """SGLang's parallel sizes with another number of replicas, which is how many requests its server warms up with."""

    def __init__(self, inner: Any, replicas: int) -> None:
        self._inner, self.num_dp_ranks = inner, replicas

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
