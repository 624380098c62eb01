"""What could not be handled is counted, and said in the log now and then."""

from __future__ import annotations

import logging

import pytest

from sglang_pat.dropped import LOG_SECONDS, MAX_KINDS, Dropped

pytestmark = pytest.mark.unit


def test_all_are_counted_and_a_flood_is_logged_once_a_second(caplog):
    now = [0.0]
    dropped = Dropped(clock=lambda: now[0])
    with caplog.at_level(logging.ERROR):
        for _ in range(50):
            dropped.note("LoadReport", ValueError("no"))
        assert dropped.total == 50 and len(caplog.records) == 1
        now[0] = LOG_SECONDS
        dropped.note("LoadReport", ValueError("again"))
    assert [record.getMessage() for record in caplog.records] == [
        "dropped a message: LoadReport: no", "dropped a message: LoadReport (and 49 more before it): again",
    ]  # fmt: skip


def test_one_kind_does_not_hide_another(caplog):
    dropped = Dropped(clock=lambda: 0.0)
    with caplog.at_level(logging.ERROR):
        dropped.note("LoadReport", ValueError("a"))
        dropped.note("Finished", ValueError("b"))
    assert len(caplog.records) == 2


def test_kinds_are_bounded(monkeypatch):
    """They are a label of a metric, and some come from bytes that somebody sent."""
    import prometheus_client

    registry = prometheus_client.CollectorRegistry()
    counter = prometheus_client.Counter
    monkeypatch.setattr(
        prometheus_client, "Counter", lambda *args, **kwargs: counter(*args, **kwargs, registry=registry)
    )
    dropped = Dropped(metrics=True, clock=lambda: 0.0)
    for i in range(10 * MAX_KINDS):
        dropped.note(f"kind {i}", ValueError())
    samples = [s for metric in registry.collect() for s in metric.samples if s.name.endswith("_total")]
    assert {s.name for s in samples} == {"sglang_pat_dropped_messages_total"}
    assert len(samples) == MAX_KINDS + 1
    assert sum(s.value for s in samples) == dropped.total == 10 * MAX_KINDS
