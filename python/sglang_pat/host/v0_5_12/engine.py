"""SGLang's launch code: what it is given, and what it is told of our processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.entrypoints.engine import SchedulerInitResult
from sglang.srt.server_args import PortArgs

from sglang_pat.host.arguments import AdaptiveServerArgs


def make_ports(identity: str, **addresses: Any) -> PortArgs:
    """SGLang's addresses; ``identity`` names the engine."""
    return PortArgs(**addresses)


def make_result(
    infos: list[dict[str, Any]], pids: list[int], wait_for_ready: Callable[[], None], join: Callable[[], None]
) -> SchedulerInitResult:
    """What SGLang's launcher is told of schedulers: what each says at its start, and functions that wait for them."""
    return SchedulerInitResult(
        scheduler_infos=infos, all_child_pids=pids, wait_for_ready=wait_for_ready, wait_for_completion=join
    )


def warm_up(args: AdaptiveServerArgs, replicas: int) -> bool:
    """Warm up as SGLang's server does, with a request for each replica."""
    from sglang.srt.entrypoints import http_server

    from sglang_pat.host.v0_5_12.arguments import make_view

    return http_server._execute_server_warmup(make_view(args, dp_size=replicas))
