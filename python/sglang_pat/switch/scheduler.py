"""Attributes of a rank's scheduler (``host/scheduler.py``) that ``switch/`` and ``rank/`` use."""

from __future__ import annotations

from array import array
from typing import Any, Protocol

from sglang_pat.config import AdaptiveConfig
from sglang_pat.dropped import Dropped
from sglang_pat.host.requests import Req, TokenizedGenerateReqInput
from sglang_pat.layout import ParallelLayout
from sglang_pat.rank.channels import RankChannel
from sglang_pat.rank.layouts import Layouts
from sglang_pat.switch.grammars import CompiledGrammars
from sglang_pat.switch.order import OutputSender


class SwitchingScheduler(Protocol):
    """Our attributes of a rank's scheduler; SGLang's are for the operations of ``host/`` alone."""

    adaptive: AdaptiveConfig
    rank: int
    base_capacity: int
    layouts: Layouts
    grammars: CompiledGrammars
    channel: RankChannel
    output: OutputSender
    load: Any
    speculation: Any
    dropped: Dropped
    _paused_by_client: bool

    @property
    def is_leader(self) -> bool: ...

    def enter_layout(self, layout: ParallelLayout, epoch: int, fence: dict[int, int] | None = None) -> None: ...

    def construct(self, message: TokenizedGenerateReqInput, prompt: array, sealed: bytes) -> Req: ...
