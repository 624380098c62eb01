"""How much of the machine other programs took meanwhile (:class:`Meter`): a figure taken beside them says little."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import psutil


class Meter:
    """Starts to measure when made. ``own``: processes that are not others, all alive until :meth:`share`."""

    def __init__(self, own: Iterable[psutil.Process]) -> None:
        self._own = list(own)
        self._begin = self._read()

    def share(self) -> float:
        """Time that other programs (and other guests of SGLang) had, as a share of all cores' time; 0 to 1."""
        total, busy, own = (now - then for now, then in zip(self._read(), self._begin, strict=True))
        return min(1.0, max(0.0, (busy - own) / total)) if total > 0 else 0.0

    def _read(self) -> tuple[float, float, float]:
        """Seconds so far, added up over the cores: all, not idle, and those of our own."""
        times = psutil.cpu_times()._asdict()
        total = sum(times[name] for name in times if not name.startswith("guest"))  # guests are in user already
        idle = times["idle"] + times.get("iowait", 0.0)
        own = 0.0
        for process in self._own:
            with suppress(psutil.NoSuchProcess):
                used = process.cpu_times()
                own += used.user + used.system
        return total, total - idle, own
