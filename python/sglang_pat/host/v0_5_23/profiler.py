"""SGLang's profiler, a component of its scheduler, on a rank."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.io_struct import ProfileReq, ProfileReqOutput
from sglang.srt.managers.scheduler_components import profiler_manager
from sglang.srt.managers.scheduler_components.profiler_manager import SchedulerProfilerManager
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel

from sglang_pat.host.assign import Overlaid, assign, assigned
from sglang_pat.host.v0_5_23.mended_scheduler import remake
from sglang_pat.rank.groups import GroupPool


class RankProfiler(SchedulerProfilerManager):
    """SGLang's profiler, which names a trace by this rank's number in the engine.

    Attributes:
        rank: that number.
    """

    rank: int

    def _profile(self, recv_req: ProfileReq) -> ProfileReqOutput | None:
        if recv_req.merge_profiles:
            # Nobody waits until the last rank has written its file.
            advice = "merge_profiles: not with --adaptive-tp; leave it out, each rank writes a trace of its own"
            return ProfileReqOutput(success=False, message=advice)
        return super()._profile(recv_req)

    def _stop_profile(self, stage: ForwardMode | None = None) -> ProfileReqOutput | None:
        named = Overlaid(get_parallel(), tp_rank=self.rank)
        with assigned(profiler_manager, get_parallel=lambda: named):
            return super()._stop_profile(stage)


def make(profiler: Any, groups: GroupPool, rank: int) -> RankProfiler:
    """The profiler of a rank, in place of SGLang's.

    It stops without SGLang's barrier: ranks of a group may have come together in the middle of a profile.
    """
    made = remake(profiler, RankProfiler)
    made.rank = rank
    assign(made, dp_tp_cpu_group=groups.get_single_group().cpu_group)
    return made
