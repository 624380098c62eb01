"""docs/observe.md names every metric, and every field of a status, a switch record and a decision log."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from sglang_pat import messages as m
from sglang_pat.figures import Figures
from sglang_pat.policies.snapshot import Decision
from sglang_pat.replay import Length, Start

from .coordinator_rig import Rig

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/observe.md").read_text()
METRIC = re.compile(r'"(sglang_pat_\w+)"')
PHASE = re.compile(r"""_mark\((.*)\)""")


def section(title: str) -> str:
    return re.split(r"^##+ ", PAGE.split(f"# {title}\n")[1], maxsplit=1, flags=re.MULTILINE)[0]


def list_named(title: str) -> set[str]:
    """What the first column of a section's table names."""
    rows = re.findall(r"^\| (`.*?) \|", section(title), re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([\w.]+)`", row)}


def test_metrics():
    sources = [path.read_text() for path in (ROOT / "python/sglang_pat").rglob("*.py")]
    made = {name for text in sources if "prometheus_client import" in text for name in METRIC.findall(text)}
    assert len(made) > 6 and list_named("Metrics") == made


def test_status():
    rig = Rig(1, 4)
    rig.coordinator.handle_status_query(m.StatusQuery(query_id=1), 0.0)
    status = rig.world.server[-1].answer
    assert list_named("Status") == set(status) | {"weight_version"}  # which the server adds
    assert list_named("A replica") == set(status["groups"][0])


def test_switch_records():
    told = set(re.findall(r"`(\w+)`", section("A switch")))
    assert set(m.SwitchRecord.__struct_fields__) <= told


def test_phases():
    marks = PHASE.findall((ROOT / "python/sglang_pat/switch/executor.py").read_text())
    phases = {name for mark in marks for name in re.findall(r'"(\w+)"', mark)}
    assert len(phases) > 5 and list_named("Phases") == phases | {"prepare"}  # which the coordinator adds


def test_decision_log():
    told = set(re.findall(r"`([\w.]+)`", section("The decision log")))
    assert {f"decision.{field.name}" for field in fields(Decision)} <= told
    assert {field.name for field in fields(Figures)} <= told
    assert {*Start.__struct_fields__, *Length.__struct_fields__} <= told
