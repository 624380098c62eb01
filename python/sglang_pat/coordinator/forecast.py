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
        ``requests`` that would be handed over, ``tokens`` of KV of those that decode; ``parked``: how many of these
        would wait for a decode slot, with their KV as far as it fits, since the new replicas decode fewer at once;
        ``recomputed_tokens``: KV for which the new replicas have no room, prefixes in common counted for each request.
    """
    reports = {rank: leaders[rank].report for rank in old.leaders}
    running = {rank: report.running if report else 0 for rank, report in reports.items()}
    tokens = {rank: report.tokens if report else 0 for rank, report in reports.items()}
    parked = lost = 0
    for leader in new.leaders:
        decoding, held = _together(running, old, new, leader), _together(tokens, old, new, leader)
        parked += max(0, decoding - max_running) if max_running is not None else 0
        report = leaders[leader].report
        room = report.kv_totals.get(new.tp) if report else None
        # A slot more for the next token of each that goes on.
        going = decoding if max_running is None else min(decoding, max_running)
        lost += max(0, held + going - room) if room is not None else 0
    return {
        "from_tp": old.tp,
        "to_tp": new.tp,
        "requests": sum(leaders[rank].requests for rank in old.leaders),
        "tokens": sum(tokens.values()),
        "parked": parked,
        "recomputed_tokens": lost,
    }


def _together(amounts: Mapping[int, int], old: ParallelLayout, new: ParallelLayout, leader: int) -> int:
    """What the replica of ``leader`` would get, where each old one has ``amounts``: all of those that merge, its share
    of one that is split."""
    if new.tp >= old.tp:
        return sum(amounts[group] for group in {old.group_of(rank) for rank in new.group(leader)})
    return -(-amounts[old.group_of(leader)] * new.tp // old.tp)
