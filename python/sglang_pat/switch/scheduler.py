"""What a switch reads and writes of the scheduler of its rank: its contract with SGLang's scheduler.

``rank/scheduler.py`` has it; the type checker holds that.  What is not ours is SGLang's, under SGLang's name.
"""

from __future__ import annotations

from array import array
from collections import deque
from typing import Any, Protocol

from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

from sglang_pat.config import AdaptiveConfig
from sglang_pat.dropped import Dropped
from sglang_pat.host.arguments import AdaptiveServerArgs
from sglang_pat.layout import ParallelLayout
from sglang_pat.rank.channels import RankChannel
from sglang_pat.rank.layouts import Layouts
from sglang_pat.switch.grammars import CompiledGrammars
from sglang_pat.switch.order import OutputSender


class SwitchingScheduler(Protocol):
    """Attributes of three kinds: ours; those that a switch takes over or empties; those that it only asks."""

    adaptive: AdaptiveConfig
    rank: int
    base_capacity: int
    layouts: Layouts
    grammars: CompiledGrammars
    channel: RankChannel
    output: OutputSender
    load: Any
    dropped: Dropped

    @property
    def is_leader(self) -> bool: ...

    def enter_layout(self, layout: ParallelLayout, epoch: int, fence: dict[int, int] | None = None) -> None: ...

    def clear_pools(self) -> None: ...

    def construct(self, given: TokenizedGenerateReqInput, prompt: array, sealed: bytes) -> Req: ...

    running_batch: ScheduleBatch
    cur_batch: ScheduleBatch | None
    last_batch: ScheduleBatch | None
    waiting_queue: list[Req]
    chunked_req: Req | None
    _chunked_req_scheduled_last_iter: bool
    result_queue: deque[Any]
    return_health_check_ipcs: deque[Any]
    req_to_token_pool: Any
    token_to_kv_pool_allocator: Any
    tree_cache: Any

    _paused_by_client: bool
    _engine_paused: bool
    chunked_prefill_size: int | None
    device: str
    enable_overlap: bool
    forward_ct: int
    grammar_manager: Any
    max_running_requests: int
    model_config: Any
    server_args: AdaptiveServerArgs
    spec_algorithm: Any
    tp_cpu_group: Any
    tp_size: int
    tp_worker: Any
    memory_saver_adapter: Any

    def is_fully_idle(self) -> bool: ...

    def get_pool_stats(self) -> Any: ...

    def maybe_send_health_check_signal(self) -> None: ...

    def process_batch_result(self, batch: ScheduleBatch, result: Any) -> None: ...

    def _check_full_pool(self, ps: Any, uncached: int = 0) -> tuple[bool, str]: ...
