"""What the ranks of a group must agree on, and how they come to.

Ranks of one TP group run the same scheduler side by side: where two of them differ in a counter or an order, one waits
in a broadcast and the other in an all-reduce, for ever.  Ranks that come together from different groups differ in
whatever has counted their steps or read their clocks.  What the new group's leader holds in :data:`TAKEN` becomes
everyone's at the switch; what else must be equal is made anew by ``AdaptiveScheduler.point_at`` and ``adopt``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_pat.layout import ParallelLayout

if TYPE_CHECKING:
    from sglang_pat.switch.scheduler import SwitchingScheduler

TAKEN = ("forward_ct", "recv_skipper._counter")
"""Attributes of SGLang's scheduler, dotted, that a rank takes over from its new leader; plain values."""

_STEP_MARKS = ("profiler_start_forward_ct", "profiler_target_forward_ct")
"""Counted in steps of this rank: they move along when ``forward_ct`` does."""


def taken(scheduler: SwitchingScheduler) -> dict[str, Any]:
    """The values of :data:`TAKEN` that this scheduler has."""
    return {path: value for path in TAKEN if (value := find(scheduler, path)) is not None}


def take(scheduler: SwitchingScheduler, values: dict[str, Any]) -> None:
    """Hold what the leader holds."""
    for name in _STEP_MARKS:
        if (mark := getattr(scheduler, name, None)) is not None:
            setattr(scheduler, name, mark + values["forward_ct"] - scheduler.forward_ct)
    for path, value in values.items():
        owner, _, name = path.rpartition(".")
        setattr(find(scheduler, owner) if owner else scheduler, name, value)


def leader_before(rank: int, old: ParallelLayout, new: ParallelLayout) -> int:
    """The old leader whose group the leader of ``rank``'s new group comes from."""
    return old.group_of(new.group_of(rank))


def find(root: Any, path: str) -> Any:
    """The attribute at this dotted path, or None."""
    for name in path.split("."):
        root = getattr(root, name, None)
    return root
