"""What a switch would do to the requests that are alive, before it is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_pat.coordinator.leader import Leader
from sglang_pat.layout import ParallelLayout


def forecast(
    leaders: Mapping[int, Leader], old: ParallelLayout, new: ParallelLayout, max_running: int | None
) -> dict[str, Any]:
    """By what the leaders last reported, up to 32 steps ago.

    Args:
        max_running: requests that a replica decodes at once; None if unbounded.

    Returns:
        ``requests`` that would be handed over, ``tokens`` of KV of those that decode, and ``parked``: how many of these
        would wait for a decode slot, with their KV, since the new replicas decode fewer at once.
    """
    reports = {rank: leaders[rank].report for rank in old.leaders}
    running = {rank: report.running if report else 0 for rank, report in reports.items()}
    parked = 0
    for leader in new.leaders:
        if new.tp >= old.tp:
            together = sum(running[group] for group in {old.group_of(rank) for rank in new.group(leader)})
        else:
            together = -(-running[old.group_of(leader)] * new.tp // old.tp)
        parked += max(0, together - max_running) if max_running is not None else 0
    return {
        "from_tp": old.tp,
        "to_tp": new.tp,
        "requests": sum(leaders[rank].requests for rank in old.leaders),
        "tokens": sum(report.tokens for report in reports.values() if report),
        "parked": parked,
    }
