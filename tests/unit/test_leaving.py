"""When one of several engines leaves a round, and what it gains (``studies.leaving``)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from sglang_pat.policies.lending import LAST_MILESTONE, Move, Others, make_lending_policy
from sglang_pat.policies.lengths import LengthHistory
from studies import leaving

from .drawn import examples
from .policy_world import crossing, profiles, snapshot, snapshots
from .profiles_for_tests import prefill_points
from .test_lending import BUSY, DEGREES, PLENTY, RANKS, learn, lend_half, make, rooms, trainings

pytestmark = pytest.mark.unit

FEW = Others(engines=1, running=4, waiting=0, tokens=8400, room=10**6)
WORK = structs.replace(BUSY, complete=60, others=FEW)
KNOWN = crossing(prefill=prefill_points(lambda tp, n, batch, length: 1e-5 * batch * length / tp, (1, 8), (128, 8192)))
SEEN = replace(snapshot([2000] * 2, tp=4, limit=4096), room=PLENTY)

others = st.builds(
    Others,
    engines=st.integers(1, 3), running=st.integers(0, 50), waiting=st.integers(0, 9),
    tokens=st.integers(0, 10**5), room=st.integers(0, 10**6), delay=st.sampled_from([0.0, 1.0]),
    lent=st.sampled_from([0.0, 0.5]),
)  # fmt: skip


@examples(150)
@given(profiles(), snapshots(), trainings, rooms, st.booleans(), others)
def test_in_any_situation(found, seen, training, room, lent, others):
    """An engine never leaves without work for the trainer, and otherwise does as if there were no others."""
    seen, history = replace(lend_half(seen) if lent else seen, room=room), LengthHistory()
    policy = make(found)
    said = policy(seen, history, structs.replace(training, others=others))
    if said.move is not Move.LEAVE:
        assert said == policy(seen, history, training)
        assert seen.requests or not training.ready or training.completion < LAST_MILESTONE
        return
    assert training.ready and training.completion >= LAST_MILESTONE and np.isfinite(said.gain)
    if len(seen.load):
        assert said.gain > 0 and training.seconds_per_token > 0, "there is something to hide"


def test_an_engine_without_requests_leaves_when_there_is_work():
    for policy in (make(crossing()), make_lending_policy(None, None, RANKS, DEGREES)):
        for idle in (snapshot([]), lend_half(snapshot([]))):
            idle = replace(idle, room=PLENTY)
            assert policy(idle, LengthHistory(), WORK).move is Move.LEAVE
            for changed in ({"ready": 0}, {"complete": 49}, {"others": None}):
                said = policy(idle, LengthHistory(), structs.replace(WORK, **changed))
                assert said.move is not Move.LEAVE, changed
            on_their_way = replace(idle, requests=1)
            assert policy(on_their_way, LengthHistory(), WORK).move is not Move.LEAVE


@pytest.mark.parametrize(
    ("changed", "leaves"),
    [
        ({}, True),
        ({"others": None}, False),
        ({"complete": 49}, False),
        ({"ready": 10}, False),
        ({"others": structs.replace(FEW, room=12_000)}, False),
        ({"others": structs.replace(FEW, delay=30.0)}, False),
        ({"others": structs.replace(FEW, engines=8, running=1, tokens=2100)}, False),
        ({"others": structs.replace(FEW, delay=1.5)}, False),
        ({"others": structs.replace(FEW, delay=1.5), "elapsed": 1e3}, True),
        ({"spare": 6}, False),
        ({"setup": 1e4}, False),
        ({"others": structs.replace(FEW, lent=0.5)}, True),
        ({"ready": 15_000}, True),
        ({"others": structs.replace(FEW, lent=0.5), "ready": 15_000}, False),
    ],
    ids=[
        "it pays", "alone", "early", "little to train", "no room", "takes long", "an eighth of all",
        "if the round ends now, much is lost", "of a long step it is little", "it is over", "a slow trainer",
        "more to train than the trainer has ranks for", "less to train", "for which those are enough",
    ],
)  # fmt: skip
def test_the_last_requests_go_on_elsewhere_where_that_pays(changed, leaves):
    """Two requests here and four there, of 2,000 of 3,000 tokens."""
    said = make(KNOWN)(SEEN, learn(3000), structs.replace(WORK, **changed))
    assert (said.move is Move.LEAVE) == leaves
    assert not leaves or said.gain > 0


def test_requests_that_end_last_in_any_case_cost_the_others_nothing():
    seen = replace(snapshot([1000] * 2, tp=4, limit=4096), room=PLENTY)
    ending = structs.replace(FEW, tokens=4 * 3000)
    assert make(KNOWN)(seen, learn(3000), structs.replace(WORK, others=ending)).move is Move.LEAVE


def test_the_others_share_its_requests():
    seen = replace(snapshot([2000] * 8, tp=4, limit=4096), room=PLENTY)
    for engines, leaves in ((1, False), (2, True)):
        told = structs.replace(FEW, engines=engines, room=33_000)
        said = make(KNOWN)(seen, learn(3000), structs.replace(WORK, others=told, returned=True))
        assert (said.move is Move.LEAVE) == leaves


def test_an_engine_that_has_lent_has_half_as_much_to_give_and_must_take_it_back():
    """Steps of an engine that has half of its ranks are twice as long."""
    seen, long = lend_half(SEEN), structs.replace(WORK, elapsed=1e4)
    seen, history = replace(seen, room=PLENTY), learn(3000)
    lent, slow = (
        make(crossing(control, prefill=KNOWN.prefill))(seen, history, long).gain for control in (0.0, 1.0)
    )  # fmt: skip
    whole = replace(seen, num_ranks=RANKS, tp=2, degrees=(2,))
    assert 0 < lent < 0.7 * make(KNOWN)(whole, history, long).gain
    assert slow == pytest.approx(lent - 0.75, abs=0.01), "a second more, in which a quarter of all ranks train more"


def test_it_stays_where_what_is_computed_again_is_not_known():
    assert make(crossing(prefill=()))(SEEN, learn(3000), WORK).move is not Move.LEAVE
    assert make_lending_policy(None, None, RANKS, DEGREES)(SEEN, learn(3000), WORK).move is not Move.LEAVE


def test_of_lending_and_leaving_it_takes_what_gains_more():
    policy, history = make(KNOWN), learn(3000)
    busy = replace(snapshot([1000] * 8, tp=1, limit=4096), room=PLENTY)
    few = structs.replace(WORK, others=structs.replace(FEW, running=8, tokens=8 * 1100))
    lent = policy(busy, history, structs.replace(few, others=None))
    assert lent.move is Move.LEND and policy(busy, history, few) == lent


@pytest.fixture(scope="module")
def step() -> tuple[leaving.Node, leaving.Task, np.ndarray, LengthHistory]:
    task = leaving.Task("8×H100, NVLink", "Llama-3.1-8B", "rollpacker", 2, 128, 1)
    shape = leaving.parse_shape(leaving.NAMED[task.shape])
    drawn = shape.draw(512, leaving.CORRELATION, leaving.GROUP, np.random.default_rng(3)).reshape(2, 2, 128)
    history = LengthHistory()
    for number, length in enumerate(drawn[0].ravel()):
        history.observe(int(length), number // leaving.GROUP)
    return leaving.Node(task.machine, task.model), task, drawn[1], history


@pytest.mark.long
def test_simulated_engines_that_leave_make_a_step_shorter(step):
    node, task, lengths, history = step
    found = {way: leaving.simulate(node, lengths, task, 32768, history, way) for way in leaving.WAYS}
    assert found["leave"].left_busy + found["leave"].left_idle == 1
    assert found["leave"].step < found["plain"].step and found["lend"].left_busy == found["lend"].left_idle == 0
    for way, one in found.items():
        assert one.step >= one.round >= found["plain"].round * (1 - 1e-9), way


def test_no_token_of_an_engine_that_leaves_is_lost(step):
    node, _, lengths, _ = step
    engines = [leaving.Running(np.full(128, leaving.PROMPT), own, np.arange(128) // leaving.GROUP) for own in lengths]
    for engine in engines:
        engine.begin(node, 0.0)
    now = engines[0].engine.seconds / 2
    for engine in engines:
        engine.look(now)
    whole = sum((engine.context + engine.left).sum() for engine in engines)
    leaving.leave(node, engines, 0, [1], now)
    assert not len(engines[0].left) and (engines[1].context + engines[1].left).sum() == whole
    assert engines[1].since > now, "what moves is computed again"
