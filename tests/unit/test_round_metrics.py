"""What ``/metrics`` says of a round."""

from __future__ import annotations

import prometheus_client
import pytest
from msgspec.structs import replace

from sglang_pat.metrics import RolloutMetrics

from .admission_world import strict, whole_epoch

pytestmark = pytest.mark.unit


@pytest.fixture
def metrics():
    made = RolloutMetrics()
    yield made
    for one in vars(made).values():
        if isinstance(one, prometheus_client.metrics.MetricWrapperBase):
            prometheus_client.REGISTRY.unregister(one)


def length(key, number: int) -> int:
    return 1 + (13 * key.index + 7 * number) % 41


def test_bias_and_redraws_are_told(metrics):
    rounds = whole_epoch(strict(unbiased=True, eta_responses=1.0), 100, length).rounds
    rounds[-1] = replace(rounds[-1], mean_seconds=3.0, plain_seconds=7.0)
    assert sum(summary.redraws for summary in rounds) > 0
    for summary in rounds:
        metrics.observe("mine", summary, {"retracted": 0, "tokens": 0})

    def value(name: str) -> float | None:
        return prometheus_client.REGISTRY.get_sample_value(f"sglang_pat_round_{name}", {"job": "mine"})

    assert value("mean_returned_tokens") == rounds[-1].mean_returned > 0
    assert value("mean_undropped_tokens") == rounds[-1].mean_undropped > 0
    assert value("mean_undropped_error_tokens") == rounds[-1].mean_undropped_error > 0
    assert (value("mean_seconds"), value("plain_seconds")) == (3.0, 7.0)
    assert value("redraws_total") == sum(summary.redraws for summary in rounds)
    assert value("gave_up_total") == 0
