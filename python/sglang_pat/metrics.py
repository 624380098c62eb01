"""Prometheus metrics of the adaptive engine, beside SGLang's own (``--enable-metrics``)."""

from __future__ import annotations

from collections.abc import Mapping

from sglang_pat.config import AdaptiveConfig
from sglang_pat.messages import SwitchRecord
from sglang_pat.predict.correction import BATCH, CONTEXT, StepFactor
from sglang_pat.rollout.records import Summary

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
        self._factor = Gauge(
            "sglang_pat_step_factor",
            f"Measured over profiled time of a decode step with {BATCH} requests of {CONTEXT} tokens a replica.",
            ["tp"],
            multiprocess_mode="mostrecent",
        )
        self._config = config
        self._set_layout(config.base.tp)

    def _set_layout(self, tp: int) -> None:
        self._tp.set(tp)
        self._dp.set(self._config.num_ranks // tp)

    def factors(self, by_degree: Mapping[int, StepFactor]) -> None:
        for tp, factor in by_degree.items():
            self._factor.labels(tp).set(factor.scale)

    def observe(self, record: SwitchRecord) -> None:
        outcome = "aborted" if record.error else "done"
        self._switches.labels(record.from_tp, record.to_tp, record.reason, outcome).inc()
        if record.error:
            return
        self._pause.observe(record.pause_seconds)
        for phase, seconds in record.phases.items():
            self._phase.labels(phase).observe(seconds)
        self._moved.inc(record.moved_bytes)
        self._set_layout(record.to_tp)


MAX_JOB_LABELS = 64
"""Jobs that ``/metrics`` tells apart, by their order of arrival; others are ``other``."""

_TOKENS = (16, 64, 256, 1024, 4096, 16384, 65536)
_AGES = (1, 2, 4, 8, 16, 32, 64)


class RolloutMetrics:
    """Fed with the summary of every round of ``/pat/rollout``."""

    def __init__(self) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        self._jobs: set[str] = set()
        self._rounds = Counter("sglang_pat_rounds_total", "Rounds.", ["job", "kind", "outcome"])
        self._prompts = Counter("sglang_pat_round_prompts_total", "Prompts at the end of rounds.", ["job", "became"])
        self._aborted = Counter("sglang_pat_round_aborted_samples_total", "Samples that were stopped.", ["job"])
        self._thrown = Counter("sglang_pat_round_thrown_tokens_total", "Tokens thrown away.", ["job"])
        self._redraws = Counter("sglang_pat_round_redraws_total", "Draws of deferred prompts, rejected.", ["job"])
        self._gave_up = Counter("sglang_pat_round_gave_up_total", "Prompts whose redraws were all too short.", ["job"])

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, ["job"], multiprocess_mode="mostrecent")

        self._drawn = gauge("sglang_pat_round_drawn_prompts", "Prompts ever started.")
        self._waiting = gauge("sglang_pat_round_waiting_prompts", "Prompts that wait for another round.")
        self._returned = gauge("sglang_pat_round_mean_returned_tokens", "Of a response that was returned.")
        self._undropped = gauge("sglang_pat_round_mean_undropped_tokens", "If nothing were thrown away, estimated.")
        self._error = gauge("sglang_pat_round_mean_undropped_error_tokens", "How far off that may be by chance.")
        self._seconds = gauge("sglang_pat_round_mean_seconds", "Of a round.")
        self._plain = gauge("sglang_pat_round_plain_seconds", "Of a round without tail batching, estimated.")
        self._version = gauge("sglang_pat_round_weight_version", "Of the last round.")
        self._retracted = Counter("sglang_pat_round_retracted_total", "Requests put back for want of KV.", ["job"])
        self._kv = gauge("sglang_pat_round_kv_tokens_left", "KV tokens of requests after the last round.")
        self._ages = Histogram(
            "sglang_pat_round_waiting_age", "Rounds that passed a waiting prompt over.", ["job"], buckets=_AGES
        )
        self._lengths = Histogram(
            "sglang_pat_round_response_tokens", "Lengths of responses, kept and aborted.", ["job", "kind", "became"],
            buckets=_TOKENS,
        )  # fmt: skip
        self._rewards = Histogram(
            "sglang_pat_round_reward", "Rewards given with verdicts.", ["job", "kind", "became"],
            buckets=(-1.0, -0.5, 0.0, 0.25, 0.5, 0.75, 1.0),
        )  # fmt: skip

    def _label(self, job: str) -> str:
        if job not in self._jobs and len(self._jobs) >= MAX_JOB_LABELS:
            return "other"
        self._jobs.add(job)
        return job

    def taken_back(self, job: str, summary: Summary) -> None:
        """Its client was gone before it had read the end of this round, which was observed before."""
        self._rounds.labels(self._label(job), summary.kind, "taken back").inc()

    def observe(self, job: str, summary: Summary, engine: dict[str, int]) -> None:
        """``engine``: what it held afterwards."""
        job = self._label(job)
        self._rounds.labels(job, summary.kind, "cancelled" if summary.cancelled else "done").inc()
        self._thrown.labels(job).inc(summary.thrown)
        self._aborted.labels(job).inc(len(summary.aborted_lengths))
        for name in ("returned", "filtered", "deferred"):
            self._prompts.labels(job, name).inc(getattr(summary, name))
        self._redraws.labels(job).inc(summary.redraws)
        self._gave_up.labels(job).inc(summary.gave_up)
        self._returned.labels(job).set(summary.mean_returned)
        self._undropped.labels(job).set(summary.mean_undropped)
        self._error.labels(job).set(summary.mean_undropped_error)
        self._seconds.labels(job).set(summary.mean_seconds)
        self._plain.labels(job).set(summary.plain_seconds)
        self._drawn.labels(job).set(summary.drawn)
        self._waiting.labels(job).set(len(summary.ages))
        self._version.labels(job).set(summary.version)
        self._retracted.labels(job).inc(engine["retracted"])
        self._kv.labels(job).set(engine["tokens"])
        for age in summary.ages:
            self._ages.labels(job).observe(age)
        for became, lengths in (("kept", summary.kept_lengths), ("aborted", summary.aborted_lengths)):
            for length in lengths:
                self._lengths.labels(job, summary.kind, became).observe(length)
        for became, rewards in (("kept", summary.kept_rewards), ("filtered", summary.filtered_rewards)):
            for reward in rewards:
                self._rewards.labels(job, summary.kind, became).observe(reward)
