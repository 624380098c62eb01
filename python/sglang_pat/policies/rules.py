"""What the deciding policies have in common: when nothing is to be decided (:func:`decide_when_idle`), when tp may be
raised (:func:`may_raise`), and what a step takes (:func:`predict_as_seen`)."""

from __future__ import annotations

from sglang_pat.policies.snapshot import Decision, Snapshot
from sglang_pat.predict.correction import CorrectedPredictor
from sglang_pat.predict.predictor import StepPredictor
from sglang_pat.speculate.steps import DraftingPredictor

SETTLE_SECONDS = 1.0
"""tp is not raised before this long after the last arrival unless the batch has arrived, so that the first requests of
a large batch do not look like its tail; nor before this long after a switch, so that an engine that had to go to the
base layout for a control request does not go back and forth for each bucket of a weight update."""

MIN_PATIENCE_SECONDS = 0.1
"""Requests of one batch come in closer together than this."""

DRAINED = 0.5
"""A batch of which at most this share of the peak is left has arrived; a fuller one may still be coming in."""

RETRY_SECONDS = 5.0
"""Seconds that the policies wait after an aborted switch."""


def decide_when_idle(snapshot: Snapshot) -> Decision | None:
    """What every deciding policy does without looking at the load; None if the load decides.

    After an abort it waits.  An empty engine goes back to the base layout, where the next round starts and weights
    are updated; unless a client has said that its round goes on.
    """
    if snapshot.now - snapshot.last_abort < RETRY_SECONDS or len(snapshot.degrees) == 1:
        return Decision(tp=snapshot.tp)
    if snapshot.requests == 0:
        return Decision(tp=snapshot.tp if snapshot.in_round else snapshot.degrees[0])
    return None


def predict_as_seen(predictor: StepPredictor, snapshot: Snapshot, max_running: int | None = None) -> StepPredictor:
    """Step times of a profile, corrected by what this run has told, and with the drafts that pay.

    Args:
        max_running: most rows of a replica's decode step; None for no bound of their own.
    """
    corrected = CorrectedPredictor(predictor, snapshot.factors)
    if not snapshot.chances:
        return corrected
    return DraftingPredictor(corrected, snapshot.chances, snapshot.draft_seconds, max_running)


def compute_completion_wait(cost: float, saving: float) -> float:
    """Seconds without an arrival after which a batch counts as complete, for a policy that knows what waiting costs.

    As long as waiting has cost less than switching in vain would: up to then neither choice is more than twice as
    expensive as the right one (the ski rental argument).

    Args:
        cost: seconds of a switch; in vain it is paid twice, there and back.
        saving: share of the time that the higher tp would save, while it waits.
    """
    return min(SETTLE_SECONDS, max(2 * cost / saving, MIN_PATIENCE_SECONDS)) if saving > 0 else SETTLE_SECONDS


def may_raise(snapshot: Snapshot, *, draining: bool | None = None, settle: float = SETTLE_SECONDS) -> bool:
    """Whether a higher tp may be chosen now: the batch has arrived, as far as one can tell.

    Args:
        draining: the batch is known to be past its arrival; None to tell by ``DRAINED``.
        settle: seconds without an arrival after which it is taken to be.
    """
    if draining is None:
        draining = snapshot.requests <= DRAINED * snapshot.peak
    if snapshot.now - snapshot.last_switch < SETTLE_SECONDS:
        return False
    return snapshot.complete or draining or snapshot.now - snapshot.last_arrival >= settle
