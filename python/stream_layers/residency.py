"""When a running judge gives up layers on the GPU, and when it takes them back (RollPacker, 4.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stream_layers.judge_memory import PLACES, count_saved

STEPS = 64
"""Number of the latest steps that are looked at."""
HIDDEN = 1.25
"""Time of a step, as a multiple of the time of its copies, from which on it does not wait for them."""
WORTH = 0.1
"""The share of the time, in steps that wait for copies, from which on layers are taken back."""


@dataclass(frozen=True, kw_only=True)
class Residency:
    """Knowledge of a rank when it looks at its memory."""

    streamed: int
    """Layers that are streamed now."""
    least: int
    """Layers that were streamed at the start: as many as had to be, beside an actor that was awake."""
    layers: int
    layer_bytes: int
    free: int
    """Bytes that this rank can take of the GPU now."""
    kept: int
    """Bytes that it could take when it had started: room for its activations."""
    copy_seconds: float
    """Seconds to copy one layer."""
    steps: Sequence[float]
    """Seconds of the latest steps with this number of layers streamed; they are long if sequences are."""

    def choose_count(self) -> int:
        """Number of layers to stream from now on.

        If less than half of the room for activations is left, more are streamed to make it whole.  Else fewer are, if
        steps wait for copies and the room stays whole.  There are never fewer than at the start: memory that a sleeping
        actor leaves free is its own.
        """
        saved = count_saved(self.streamed)
        if self.free < self.kept // 2:
            saved += -(-(self.kept - self.free) // self.layer_bytes)
        elif self.do_steps_wait():
            saved -= max(0, self.free - self.kept) // self.layer_bytes
        saved = min(max(saved, count_saved(self.least)), count_saved(self.layers))
        return saved and saved + PLACES

    def do_steps_wait(self) -> bool:
        """Whether the copies made the latest steps longer: those of short sequences, and of decode."""
        hidden_from = HIDDEN * self.streamed * self.copy_seconds
        waited = sum(seconds for seconds in self.steps if seconds < hidden_from)
        return len(self.steps) == STEPS and waited > WORTH * sum(self.steps)
