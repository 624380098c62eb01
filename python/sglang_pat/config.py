"""Configuration of the adaptive engine (:class:`AdaptiveConfig`), validated once and never changed."""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_pat.layout import (
    ParallelLayout,
    choose_default_degrees,
    get_device_of_rank,
    list_candidate_layouts,
    list_strides,
)

POLICIES = ("survival", "pat", "threshold", "schedule", "manual", "off")
PREDICTING = ("survival", "pat")
"""Policies that need a profile."""
DECIDING = (*PREDICTING, "threshold")
"""Policies that choose by the load."""
WEIGHT_MODES = ("resident", "reshard")
KV_EXCHANGES = ("direct", "alltoall", "allgather")
KV_MODES = ("auto", "migrate", "recompute")
GPU_ORDERS = ("rank", "neighbours")
VARIABLE = "SGLANG_PAT"
"""Variable with which whatever launches SGLang in a process gets the adaptive engine:
``base_tp=1,policy=survival,…``."""
MOST_STEPS = 1000
"""Most decode steps of a turn of the calibration."""
MOST_DRAFTS, AUTO_DRAFTS = 16, 8
"""Most drafts of a request in one decode step: that may be given, and that the engine chooses by itself."""


def check_choice(flag: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise ``ValueError`` unless ``value``, given with ``flag``, is allowed."""
    if value not in allowed:
        raise ValueError(f"{flag} {value!r}: choose one of {', '.join(allowed)}")


@dataclass(frozen=True, kw_only=True)
class AdaptiveConfig:
    """What ``--adaptive-tp`` and the ``--pat-*`` flags say; ``sglang_pat/settings.py`` tells what each means.

    Attributes:
        base: layout that the engine starts in and returns to.
        degrees: candidate TP degrees; None for every doubling of the base degree, or only for the lowest and the
            highest of these (:attr:`only_ends`).
        max_running: most requests that one replica decodes at once; None if unbounded.
        layouts: all of them, lowest degree (the base) first.

    Raises:
        ValueError: with what was given and what is allowed.
    """

    base: ParallelLayout
    degrees: tuple[int, ...] | None = None
    policy: str = "threshold"
    profile: str | None = None
    profile_as_is: bool = False
    calibrate: int = 16
    log: str | None = None
    switch_at: int = 8
    max_running: int | None = None
    weights: str = "resident"
    kv: str = "auto"
    kv_exchange: str = "direct"
    gpu_order: str = "rank"
    speculate: str = "off"
    draft_model: str | None = None
    layouts: tuple[ParallelLayout, ...] = field(init=False)

    def __post_init__(self) -> None:
        check_choice("--pat-policy", self.policy, POLICIES)
        check_choice("--pat-weights", self.weights, WEIGHT_MODES)
        check_choice("--pat-kv", self.kv, KV_MODES)
        check_choice("--pat-kv-exchange", self.kv_exchange, KV_EXCHANGES)
        check_choice("--pat-gpu-order", self.gpu_order, GPU_ORDERS)
        if self.predicts and self.profile is None:
            raise ValueError(
                f"--pat-policy {self.policy} needs a profile: give --pat-profile FILE "
                "(python -m profiler.sweep makes one) or choose --pat-policy threshold"
            )
        if not 0 <= self.calibrate <= MOST_STEPS:
            raise ValueError(f"--pat-calibrate {self.calibrate}: must be 0 to {MOST_STEPS}")
        if self.switch_at < 1:
            raise ValueError(f"--pat-switch-at {self.switch_at}: must be at least 1")
        self._check_speculation()
        degrees = self.degrees
        if degrees is None:
            degrees = choose_default_degrees(
                [layout.tp for layout in list_candidate_layouts(self.base)], self.only_ends
            )
        object.__setattr__(self, "layouts", tuple(list_candidate_layouts(self.base, list(degrees))))

    def _check_speculation(self) -> None:
        if self.speculate == "auto" and self.profile is None:
            raise ValueError(
                "--pat-speculate auto needs a profile: give --pat-profile FILE (python -m profiler.sweep makes one) or "
                f"a number of drafts, 1 to {MOST_DRAFTS}"
            )
        if self.draft_model and self.speculate == "off":
            raise ValueError("--pat-draft-model needs --pat-speculate auto, or a number of drafts")
        number = self.speculate
        if number not in ("off", "auto") and not (number.isdecimal() and 1 <= int(number) <= MOST_DRAFTS):
            raise ValueError(f"--pat-speculate {number!r}: give off, auto, or a number of drafts, 1 to {MOST_DRAFTS}")

    @property
    def most_drafts(self) -> int:
        """Most drafts of a request in one decode step; 0 where nothing is drafted."""
        named = {"off": 0, "auto": AUTO_DRAFTS}
        return named[self.speculate] if self.speculate in named else int(self.speculate)

    @property
    def num_ranks(self) -> int:
        return self.base.num_ranks

    @property
    def only_ends(self) -> bool:
        """Whether nobody goes to a degree between the lowest and the highest: ``threshold`` does not, and without a
        profile nobody knows what such a degree is good for."""
        return self.policy == "threshold" and self.profile is None

    @property
    def predicts(self) -> bool:
        return self.policy in PREDICTING

    @property
    def calibrates(self) -> bool:
        """Whether the layouts are measured before the first request."""
        return self.predicts and not self.profile_as_is and self.calibrate > 0 and len(self.layouts) > 1

    def get_gpu_index(self, rank: int) -> int:
        """Number of the GPU of ``rank`` among the engine's, from 0: the rank's own, as trainers expect that hand
        weights over by IPC, unless neighbours are to merge first."""
        return get_device_of_rank(rank, self.num_ranks) if self.gpu_order == "neighbours" else rank

    def layout(self, tp: int, stride: int = 1) -> ParallelLayout:
        """The candidate of degree ``tp``, with ranks lent where ``stride`` is above 1.

        Raises:
            ValueError: not a candidate, or too few ranks are left for it; the message lists what there is.
        """
        left = self.list_degrees(stride)
        if tp in left:
            return ParallelLayout(tp, self.num_ranks // tp, stride)
        if tp in self.list_degrees():
            raise ValueError(
                f"tp={tp}: too few ranks work, {self.num_ranks // stride} of {self.num_ranks}; "
                f"take the lent ones back, or choose one of {left}"
            )
        raise ValueError(f"tp={tp} is not a candidate; choose one of {left} (--pat-candidates)")

    def check_stride(self, stride: int) -> None:
        """Raises ValueError: ranks cannot be lent with this stride; one line that says what can be."""
        if self.weights == "reshard":
            raise ValueError("--pat-weights reshard: lent ranks would miss how weights move; start without it")
        strides = list_strides(self.layouts)
        degrees = ",".join(str(layout.tp) for layout in self.layouts)
        if not strides:
            raise ValueError(
                f"--pat-candidates {degrees}: no ranks can be lent; give {self.num_ranks} and a lower degree, too"
            )
        if stride not in strides:
            raise ValueError(f"stride={stride}: choose one of {strides} (--pat-candidates {degrees})")

    def list_degrees(self, stride: int = 1) -> list[int]:
        """Degrees of the candidates in which ranks can be lent with this stride, ascending."""
        return [layout.tp for layout in self.layouts if layout.dp % stride == 0]


def parse_degrees(text: str | None) -> tuple[int, ...] | None:
    """``"1,2,4"`` → ``(1, 2, 4)``; None stays None."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--pat-candidates {text!r}: give TP degrees separated by commas, e.g. 1,2,4") from None
