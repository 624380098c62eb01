"""Before its first request an engine measures its layouts; afterwards it is as if it had not, but for the factors."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from sglang_pat.predict import profile as profiles

from .made_up import made_up

FLAGS = "--tp 1 --dp 2 --adaptive-tp --pat-policy survival"


@pytest.fixture(scope="module")
def wrong(deployment, tmp_path_factory) -> Path:
    """The profile of a machine on which a step of tp2 takes a hundred times as long as one of tp1."""
    found = made_up(deployment)
    decode = tuple(msgspec.structs.replace(point, seconds=1.0 if point.tp == 2 else 0.01) for point in found.decode)
    path = tmp_path_factory.mktemp("profile") / "wrong.json"
    profiles.save(msgspec.structs.replace(found, decode=decode), path)
    return path


def one(number: int) -> dict:
    """A request of a single token: what decodes nothing corrects nothing."""
    ids = [6 + (number * 97 + i * 31) % 490 for i in range(12)]
    return {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}}


def test_it_begins_as_any_other_engine_but_knows_its_layouts(servers, llama, wrong):
    states, answers = {}, {}
    for steps in (0, 8):
        server = servers.get(llama, *FLAGS.split(), "--pat-profile", str(wrong), "--pat-calibrate", str(steps))
        answers[steps] = [answer["output_ids"] for answer in server.generate([one(n) for n in range(3)])]
        assert server.post("/flush_cache").status_code == 200
        states[steps] = server.status()
        del states[steps]["totals"]["seconds"]
        assert ("calibrated in" in server.log_text()) == (steps > 0), server.log_text()[-3000:]
    factors = {steps: state.pop("step_factors") for steps, state in states.items()}
    assert factors[0] == {"1": [1.0, 0.0, 0.0], "2": [1.0, 0.0, 0.0]}
    assert factors[8]["2"][0] < factors[8]["1"][0], "its steps take nothing like a hundred times as long"
    assert factors[8]["2"][1:] != [0.0, 0.0], "at several batches and contexts"
    assert states[8] == states[0], "layout, KV in use, switches, requests"
    assert answers[8] == answers[0]


def test_it_is_calibrated_once(servers, llama, wrong):
    server = servers.get(llama, *FLAGS.split(), "--pat-profile", str(wrong), "--pat-calibrate", "8")
    server.generate([one(n) for n in range(4)])
    assert server.log_text().count("calibrated in") == 1
