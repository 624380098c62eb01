"""The switch's state machine, and the faults that tests inject into it."""

from __future__ import annotations

import itertools
import re
import signal

import pytest

from sglang_pat.checks import faults
from sglang_pat.switch import state
from sglang_pat.switch.state import SwitchState, advance

pytestmark = pytest.mark.unit

S = SwitchState
MAIN = [S.IDLE, S.PREPARE, S.QUIESCE, S.EXCHANGE, S.COMMIT, S.RESUME, S.IDLE]
TRANSITIONS = (
    set(itertools.pairwise(MAIN)) | {(s, S.ABORT) for s in (S.PREPARE, S.QUIESCE, S.EXCHANGE)} | {(S.ABORT, S.IDLE)}
)
"""The drawing in the module's docstring, read by a person."""


@pytest.mark.parametrize(("current", "to"), itertools.product(S, repeat=2), ids=lambda s: s.name)
def test_transitions(current, to):
    if (current, to) in TRANSITIONS:
        assert advance(current, to) is to
    else:
        with pytest.raises(RuntimeError, match=f"switch cannot go from {current.name} to {to.name}"):
            advance(current, to)


def test_docstring_draws_the_main_path():
    drawn = next(line for line in state.__doc__.splitlines() if "->" in line)
    assert [S[name] for name in re.findall(r"[A-Z]+", drawn)] == MAIN


def test_every_state_leads_back_to_idle():
    for start in S:
        reached, frontier = {start}, [start]
        while frontier:
            here = frontier.pop()
            new = {to for frm, to in TRANSITIONS if frm is here} - reached
            reached |= new
            frontier += new
        assert S.IDLE in reached


@pytest.mark.parametrize(
    ("spec", "hits"),
    [
        ("EXCHANGE:1:raise", [(S.EXCHANGE, 1, 1), (S.EXCHANGE, 1, 2)]),
        ("EXCHANGE:1:raise:2", [(S.EXCHANGE, 1, 2)]),
        ("PREPARE:0:raise", [(S.PREPARE, 0, 1), (S.PREPARE, 0, 2)]),
        ("", []),
    ],
)
def test_faults_hit_their_place_only(monkeypatch, spec, hits):
    monkeypatch.setenv(faults.ENV, spec)
    for place in itertools.product(S, range(3), (1, 2)):
        if place in hits:
            with pytest.raises(faults.InjectedFault, match=f"{place[0].name} on rank {place[1]}"):
                faults.check(*place)
        else:
            faults.check(*place)


def test_no_fault_without_the_variable(monkeypatch):
    monkeypatch.delenv(faults.ENV, raising=False)
    faults.check(S.COMMIT, 0, 1)


def test_kill(monkeypatch):
    killed = []
    monkeypatch.setenv(faults.ENV, "QUIESCE:0:kill")
    monkeypatch.setattr(faults.os, "kill", lambda pid, sig: killed.append((pid, sig)))
    faults.check(S.QUIESCE, 1, 1)
    assert not killed
    with pytest.raises(faults.InjectedFault):  # not reached by a process that is really killed
        faults.check(S.QUIESCE, 0, 1)
    assert killed == [(faults.os.getpid(), signal.SIGKILL)]


def test_a_fault_from_a_file_comes_and_goes(monkeypatch, tmp_path):
    path = tmp_path / "fault"
    monkeypatch.setenv(faults.ENV, f"@{path}")
    faults.check(S.EXCHANGE, 1, 1)
    path.write_text("EXCHANGE:1:raise\n")
    with pytest.raises(faults.InjectedFault, match="EXCHANGE on rank 1"):
        faults.check(S.EXCHANGE, 1, 2)
    faults.check(S.EXCHANGE, 0, 2)
    path.unlink()
    faults.check(S.EXCHANGE, 1, 3)


def test_a_rank_is_held_until_its_file_says_something_else(monkeypatch, tmp_path):
    path = tmp_path / "fault"
    path.write_text("QUIESCE:1:hold")
    monkeypatch.setenv(faults.ENV, f"@{path}")
    turns = []

    def turn(seconds):
        turns.append(faults.held(path).exists())
        if len(turns) == 3:
            path.unlink()

    monkeypatch.setattr(faults.time, "sleep", turn)
    faults.check(S.QUIESCE, 0, 1)
    assert not turns
    faults.check(S.QUIESCE, 1, 1)
    assert turns == [True] * 3 and not faults.held(path).exists()
