"""Prometheus metrics of the adaptive engine (:class:`SwitchMetrics`), beside SGLang's own (``--enable-metrics``)."""

from __future__ import annotations

from collections.abc import Mapping

from sglang_pat.config import AdaptiveConfig
from sglang_pat.messages import StepCounts, SwitchRecord
from sglang_pat.predict.correction import BATCH, CONTEXT, StepFactor

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class SwitchMetrics:
    """Fed by the coordinator with every finished or aborted switch.

    Created after SGLang has set its multiprocess directory, so that ``/metrics`` shows them.
    """

    def __init__(self, config: AdaptiveConfig) -> None:
        # Decides on import whether it works across processes, by an environment variable that SGLang sets late.
        from prometheus_client import Counter, Gauge, Histogram

        self._switches = Counter(
            "sglang_pat_switches_total", "Switches between layouts.", ["from_tp", "to_tp", "reason", "outcome"]
        )
        self._pause = Histogram("sglang_pat_switch_pause_seconds", "Time no step ran for a switch.", buckets=_SECONDS)
        self._phase = Histogram(
            "sglang_pat_switch_phase_seconds", "Time of each phase, slowest rank.", ["phase"], buckets=_SECONDS
        )
        self._moved = Counter("sglang_pat_switch_moved_bytes_total", "KV bytes sent between ranks.")
        self._tp = Gauge("sglang_pat_layout_tp", "Tensor-parallel degree in force.", multiprocess_mode="mostrecent")
        self._dp = Gauge("sglang_pat_layout_dp", "Number of replicas in force.", multiprocess_mode="mostrecent")
        self._lent = Gauge("sglang_pat_lent_ranks", "Ranks that are lent.", multiprocess_mode="mostrecent")
        self._factor = Gauge(
            "sglang_pat_step_factor",
            f"Measured over profiled time of a decode step with {BATCH} requests of {CONTEXT} tokens a replica.",
            ["tp"],
            multiprocess_mode="mostrecent",
        )
        self._decode_steps = Counter("sglang_pat_decode_steps_total", "Decode steps of replicas.")
        self._draft_steps = Counter("sglang_pat_draft_steps_total", "Decode steps that checked drafts.")
        self._drafts = Counter("sglang_pat_drafts_total", "Drafts that were checked.")
        self._right_drafts = Counter("sglang_pat_right_drafts_total", "Drafts that were right.")
        self._config = config
        self._set_layout(config.base.tp, 0)

    def _set_layout(self, tp: int, lent: int) -> None:
        self._tp.set(tp)
        self._dp.set((self._config.num_ranks - lent) // tp)
        self._lent.set(lent)

    def set_factors(self, by_degree: Mapping[int, StepFactor]) -> None:
        for tp, factor in by_degree.items():
            self._factor.labels(tp).set(factor.scale)

    def count_steps(self, counts: StepCounts) -> None:
        self._decode_steps.inc(counts.decode_steps)
        self._draft_steps.inc(counts.draft_steps)
        self._drafts.inc(counts.drafts)
        self._right_drafts.inc(counts.right_drafts)

    def observe(self, record: SwitchRecord) -> None:
        outcome = "aborted" if record.error else "done"
        self._switches.labels(record.from_tp, record.to_tp, record.reason, outcome).inc()
        if record.error:
            return
        self._pause.observe(record.pause_seconds)
        for phase, seconds in record.phases.items():
            self._phase.labels(phase).observe(seconds)
        self._moved.inc(record.moved_bytes)
        self._set_layout(record.to_tp, len(record.lent))
