"""The faults that tests inject into a switch."""

from __future__ import annotations

import itertools
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from sglang_pat.checks import faults

pytestmark = pytest.mark.unit

STATES = ("IDLE", "PREPARE", "QUIESCE", "EXCHANGE", "COMMIT", "RESUME", "ABORT")


@pytest.mark.parametrize(
    ("spec", "hits"),
    [
        ("EXCHANGE:1:raise", [("EXCHANGE", 1, 1), ("EXCHANGE", 1, 2)]),
        ("EXCHANGE:1:raise:2", [("EXCHANGE", 1, 2)]),
        ("PREPARE:0:raise", [("PREPARE", 0, 1), ("PREPARE", 0, 2)]),
        ("", []),
    ],
)
def test_faults_hit_their_place_only(monkeypatch, spec, hits):
    monkeypatch.setenv(faults.ENV, spec)
    for place in itertools.product(STATES, range(3), (1, 2)):
        if place in hits:
            with pytest.raises(faults.InjectedFault, match=f"{place[0]} on rank {place[1]}"):
                faults.check(*place)
        else:
            faults.check(*place)


def test_no_fault_without_the_variable(monkeypatch):
    monkeypatch.delenv(faults.ENV, raising=False)
    faults.check("COMMIT", 0, 1)


def test_kill(monkeypatch):
    killed = []
    monkeypatch.setenv(faults.ENV, "QUIESCE:0:kill")
    monkeypatch.setattr(faults.os, "kill", lambda pid, sig: killed.append((pid, sig)))
    faults.check("QUIESCE", 1, 1)
    assert not killed
    with pytest.raises(faults.InjectedFault):  # not reached by a process that is really killed
        faults.check("QUIESCE", 0, 1)
    assert killed == [(faults.os.getpid(), signal.SIGKILL)]


def test_a_fault_from_a_file_comes_and_goes(monkeypatch, tmp_path):
    path = tmp_path / "fault"
    monkeypatch.setenv(faults.ENV, f"@{path}")
    faults.check("EXCHANGE", 1, 1)
    path.write_text("EXCHANGE:1:raise\n")
    with pytest.raises(faults.InjectedFault, match="EXCHANGE on rank 1"):
        faults.check("EXCHANGE", 1, 2)
    faults.check("EXCHANGE", 0, 2)
    path.unlink()
    faults.check("EXCHANGE", 1, 3)


def test_a_rank_is_held_until_its_line_is_closed(monkeypatch, tmp_path):
    path = tmp_path / "fault"
    path.write_text("QUIESCE:1:hold")
    monkeypatch.setenv(faults.ENV, f"@{path}")
    os.mkfifo(faults.get_hold_path(path))
    faults.check("QUIESCE", 0, 1)
    with ThreadPoolExecutor() as pool:
        held = pool.submit(faults.check, "QUIESCE", 1, 1)
        with faults.get_hold_path(path).open() as line:
            assert line.read(4) == "held" and not held.done()
        held.result(timeout=60)
