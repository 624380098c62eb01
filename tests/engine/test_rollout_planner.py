"""Rounds on a real engine: the planner of start degrees."""

from __future__ import annotations

import pytest
import requests

from sglang_pat.predict import profile as profiles
from sglang_pat.testing.server import Server

from .made_up import made_up
from .rollout_calls import body, one_round, prompt, schedule


@pytest.fixture
def planned(servers, llama, deployment, tmp_path_factory) -> Server:
    """Little KV, and a profile by which tp1 is faster for many requests and tp2 for few."""
    path = tmp_path_factory.getbasetemp() / "planned.json"
    if not path.exists():
        profiles.save(made_up(deployment), path)
    flags = ("--schedule-conservativeness", "0.05", "--pat-profile", str(path), "--pat-profile-as-is")
    return servers.adaptive(llama, 2, *flags, max_total_tokens=700)


def by_planner(server: Server) -> list[int]:
    """Degrees to which a planner has switched."""
    return [record["to_tp"] for record in server.status()["switches"] if record["reason"] == "planner"]


def test_the_planner_raises_tp_when_kv_runs_out(planned, llama):
    """A pool so small that requests are put back: the second short round with more of them starts in tp2."""
    retracted, first = [], {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}
    more = first | {"max_new_tokens": 120}
    rules = {"job": "planner", "planner": True, "eta_prompts": 1.0, "eta_responses": 1.0, "num_prompts": 8}
    for number, sampling in enumerate((first, more, more)):
        prompts = [prompt(0, 8 * number + index) for index in range(8)]
        schedule(planned, {"arrived": 16})
        _, summary = one_round(planned, body(prompts, sampling_params=sampling, **rules))
        retracted.append(summary["engine"]["retracted"])
        assert by_planner(planned) == ([2] if number == 2 else []), retracted
    assert retracted[1] > 1.05 * retracted[0], retracted
    # It held for that round; a weight update finds the engine in the base layout, or takes it there.
    update = {"model_path": str(llama)}
    assert requests.post(f"{planned.url}/update_weights_from_disk", json=update).json()["success"]
    assert planned.status()["layout"]["tp"] == 1


def test_the_planner_starts_with_what_the_profile_says(planned):
    before = by_planner(planned)
    requests.delete(f"{planned.url}/pat/rollout/planner")
    rules = {"planner": True, "eta_prompts": 1.0, "eta_responses": 1.0, "num_responses": 1}
    sampling = {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True}
    for job, count, switched in (("many", 24, []), ("few", 1, [2])):
        prompts = [prompt(0, index) for index in range(count)]
        one_round(planned, body(prompts, job=job, num_prompts=count, sampling_params=sampling, **rules))
        assert by_planner(planned) == before + switched, job
        # And what it asked for with it.
        assert requests.delete(f"{planned.url}/pat/rollout/{job}").status_code == 200
