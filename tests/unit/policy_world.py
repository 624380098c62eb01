"""Snapshots and random machines for tests of the policies that predict."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from sglang_pat.policies.snapshot import Load, Snapshot
from sglang_pat.predict.cost import SwitchCosts
from sglang_pat.predict.predictor import Predictor
from sglang_pat.predict.profile import Profile

from .profiles_for_tests import LAYOUTS, decode_points, prefill_points, profile, switch_sample

NOW = 1000.0
DEGREES = (1, 2, 4)


def snapshot(
    outputs=(), tp=1, prompt=100, limit=4096, families=None, replicas=None, peak=None, quiet=60.0, since_switch=600.0,
    since_abort=600.0, requests=None, degrees=DEGREES, complete=False, coming=0,
    in_round=False,
) -> Snapshot:  # fmt: skip
    """A snapshot of requests with these present lengths, by default dealt out to the replicas in turn; ``coming``: so
    many are expected in all."""
    outputs = np.asarray(outputs, dtype=np.int64)
    number = len(outputs)
    return Snapshot(
        now=NOW,
        tp=tp,
        degrees=degrees,
        num_ranks=4,
        requests=number if requests is None else requests,
        peak=number if peak is None else peak,
        last_arrival=NOW - quiet,
        last_switch=NOW - since_switch,
        last_abort=NOW - since_abort,
        complete=complete,
        in_round=in_round,
        load=Load(
            prompt=np.broadcast_to(np.int64(prompt), number),
            output=outputs,
            limit=np.broadcast_to(np.int64(limit), number),
            family=np.arange(number) if families is None else np.asarray(families),
            replica=np.arange(number) % (4 // tp) if replicas is None else np.asarray(replicas),
        ),
        coming=Load(
            prompt=np.full(coming, 100),
            output=np.zeros(coming, dtype=np.int64),
            limit=np.full(coming, 4096),
            family=-1 - np.arange(coming),
            replica=np.zeros(coming, dtype=np.int64),
        ),
    )


_machines: dict[str, tuple[Predictor, SwitchCosts]] = {}


def machine(found: Profile) -> tuple[Predictor, SwitchCosts]:
    """What predicts from a profile; made once for equal ones, for nothing changes it."""
    key = repr(found)
    if key not in _machines:
        predictor = Predictor(found)
        _machines[key] = predictor, SwitchCosts(found, predictor)
    return _machines[key]


def crossing(control=0.05, kv=1e-7, **parts) -> Profile:
    """Four ranks on which tp=4 decodes one request 1.8 times as fast as tp=1, and 64 requests a fifth as fast."""

    def step(tp: int, replicas: int, batch: int, context: int) -> float:
        return 8e-3 / tp + 3e-4 * (tp - 1) + batch * (5e-5 + 1.5e-4 * (tp - 1)) + 2e-9 * batch * context / tp

    switches = tuple(
        switch_sample(a, b, n, tokens, control=control, kv=kv * tokens)
        for a, _ in LAYOUTS
        for b, _ in LAYOUTS
        if a != b
        for n, tokens in ((2, 2000), (8, 40000))
    )
    parts.setdefault("decode", decode_points(step, (1, 2, 4, 8, 16, 32, 64, 128), (128, 1024, 8192)))
    parts.setdefault("switches", switches)
    return profile(**parts)


@st.composite
def profiles(draw) -> Profile:
    seconds = st.floats(1e-4, 0.1)
    decode = decode_points(lambda *_: draw(seconds), draw(st.sampled_from([(1,), (1, 8)])), (128, 2048))
    prefill = prefill_points(lambda *_: draw(seconds), (1, 4), (128, 2048))
    switches = tuple(
        switch_sample(
            a, b, draw(st.integers(0, 9)), draw(st.integers(0, 9000)), kv=draw(st.floats(0, 1)),
            weights=draw(st.floats(0, 2)), install=draw(st.floats(0, 1)),
        )
        for a, b in ((1, 2), (1, 4), (4, 1))
    )  # fmt: skip
    return profile(decode=decode, prefill=prefill, switches=switches)


@st.composite
def snapshots(draw) -> Snapshot:
    """Any load in any layout."""
    number = draw(st.integers(0, 40))
    tp = draw(st.sampled_from(DEGREES))
    lists = {
        "outputs": st.integers(0, 5000),
        "prompt": st.integers(1, 3000),
        "limit": st.integers(1, 5000),
        "families": st.integers(0, 5),
        "replicas": st.integers(0, 4 // tp - 1),
    }
    columns = {
        name: np.array(draw(st.lists(values, min_size=number, max_size=number)), dtype=int)
        for name, values in lists.items()
    }
    seconds = st.sampled_from([0.0, 0.3, 1.0, 4.0, 100.0])
    return snapshot(
        tp=tp,
        peak=number + draw(st.integers(0, 40)),
        requests=number + draw(st.sampled_from([0, 0, 3])),
        quiet=draw(seconds),
        since_switch=draw(seconds),
        since_abort=draw(st.sampled_from([0.0, 100.0])),
        complete=draw(st.booleans()),
        in_round=draw(st.booleans()),
        coming=draw(st.sampled_from([0, 0, 1, 50])),
        **columns,
    )
