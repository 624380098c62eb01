"""Attributes of SGLang's ``Scheduler`` that this folder reads and writes; the type checker holds the list."""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch


class SglangScheduler(Protocol):
    """SGLang's ``Scheduler``, under SGLang's names."""

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

    _engine_paused: bool
    chunked_prefill_size: int | None
    device: str
    enable_overlap: bool
    forward_ct: int
    grammar_manager: Any
    max_running_requests: int
    model_config: Any
    server_args: Any
    spec_algorithm: Any
    tp_cpu_group: Any
    tp_worker: Any
    memory_saver_adapter: Any

    def is_fully_idle(self) -> bool: ...

    def get_pool_stats(self) -> Any: ...

    def maybe_send_health_check_signal(self) -> None: ...

    def process_batch_result(self, batch: ScheduleBatch, result: Any) -> None: ...

    def _check_full_pool(self, ps: Any, uncached: int = 0) -> tuple[bool, str]: ...
