"""The best schedule of switches for a batch whose lengths are known: what any policy's time is measured against."""

from __future__ import annotations

import numpy as np

from sglang_pat.replay.simulate import Drain, Run


def oracle(drain: Drain) -> Run:
    """Least total time from the base layout, by dynamic programming over (point, layout).

    ``best[j, t]``: least time from point j to the end when layout t is entered there.  It is held up to some later
    point k and left for another layout, or held to the end; what a layout takes does not depend on the past, so this
    is exact.  O(points² · degrees) time.
    """
    degrees, last = drain.degrees, len(drain.points) - 1
    best = np.zeros((last + 1, len(degrees)))
    # Best continuation when the layout is left at a point, and for which.
    onward = np.full((last + 1, len(degrees)), np.inf)
    target = np.zeros((last + 1, len(degrees)), dtype=int)
    until = np.full((last + 1, len(degrees)), last)
    for point in range(last - 1, -1, -1):
        for t, tp in enumerate(degrees):
            held = drain.seconds(tp, point)
            totals = held[1:] + onward[point + 1 :, t]
            totals[-1] = held[-1]
            choice = int(np.argmin(totals))
            best[point, t], until[point, t] = totals[choice], point + 1 + choice
        for t, tp in enumerate(degrees):
            for other, to in enumerate(degrees):
                if to == tp:
                    continue
                seconds = drain.switch_seconds(point, tp, to) + best[point, other]
                if seconds < onward[point, t]:
                    onward[point, t], target[point, t] = seconds, other
    schedule: list[tuple[int, int]] = []
    point, t = 0, 0
    if last and onward[0, 0] < best[0, 0]:
        t = int(target[0, 0])
        schedule.append((0, degrees[t]))
    while until[point, t] < last:
        point = int(until[point, t])
        t = int(target[point, t])
        schedule.append((point, degrees[t]))
    return drain.scheduled(schedule)
