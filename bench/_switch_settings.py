"""What ``bench/switch.py`` measures: ranks and degrees, and the points of each setting."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """Ranks and the two degrees between which they switch; tokens alive × requests to measure.

    ``headline``: tokens and requests of the comparison with a restart; ``after``: of the steps after a switch, which
    are compared with the static layout's ``pairs`` times there and back.
    """

    ranks: int
    low: int
    high: int
    points: tuple[tuple[int, int], ...]
    headline: tuple[int, int] = (8192, 8)
    after: tuple[int, int] = (1024, 8)
    pairs: int = 30

    @property
    def flags(self) -> tuple[str, ...]:
        degrees = f"{self.low},{self.high}"
        return ("--tp", str(self.low), "--dp", str(self.ranks // self.low), "--pat-candidates", degrees)


POINTS = tuple((k * 1024, n) for k, n in ((1, 1), (1, 8), (1, 32), (8, 8), (32, 8), (64, 32)))
"""SmolLM2 takes 8,192 tokens a request."""
SETTINGS = {
    "2 ranks": Setting(2, 1, 2, POINTS),
    "4 ranks": Setting(4, 2, 4, POINTS),
}
QUICK = {"2 ranks, tiny": Setting(2, 1, 2, ((512, 1), (2048, 8)), headline=(2048, 8))}
