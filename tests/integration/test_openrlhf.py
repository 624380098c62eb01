"""OpenRLHF's own trainer with adaptive engines; 2 ranks, one engine, GRPO.  vLLM is not installed."""

from __future__ import annotations

import itertools
import json
import math

import pytest
from on_cpu import deepspeed_ops

pytestmark = pytest.mark.integration

FAST = ("--actor.adam.lr", "3e-3")
"""A learning rate at which weights that did not arrive would show."""
AGREE = 0.02
"""Nats: how far trainer and engine, both in bfloat16, may be apart in the mean."""


@pytest.mark.long
def test_collocated(openrlhf_job):
    job = openrlhf_job(*FAST)
    assert len(job.steps) == 3 and job.switches("decisions.0.jsonl") >= 3
    assert max(map(abs, job.series("vllm_kl"))) < AGREE
    assert all(math.isfinite(loss) for loss in job.series("policy_loss"))
    assert job.tells_of_the_engine()


@pytest.mark.long
def test_a_mixture_of_experts(openrlhf_mixture_job):
    """Weights come by transformers' names: all experts of a layer in one tensor."""
    job = openrlhf_mixture_job(*FAST)
    assert len(job.steps) == 3 and job.switches("decisions.0.jsonl") >= 3
    assert max(map(abs, job.series("vllm_kl"))) < AGREE


def test_async_with_partial_rollout(openrlhf_job):
    """Weights come by broadcast, into requests that are paused in mid-decode."""
    job = openrlhf_job("--mode", "async", *FAST)
    assert len(job.steps) == 3 and job.switches("decisions.0.jsonl") >= 1
    assert max(map(abs, job.series("vllm_kl"))) < AGREE + 0.05, "responses of which a part is by older weights, too"
    assert all(math.isfinite(loss) for loss in job.series("policy_loss"))
    assert max(job.series("rollout/switches")) >= 1 and "adaptive engine of 2 ranks: begins in tp1×dp2" in job.log
    assert "step: " in job.log
    lines = map(json.loads, (job.out / "decisions.0.jsonl").read_text().splitlines())
    seen = [line["snapshot"] for line in lines if line["event"] == "decision"]
    in_round = itertools.dropwhile(lambda snapshot: not snapshot["in_round"], seen)
    first = itertools.takewhile(lambda snapshot: snapshot["in_round"], in_round)
    assert any(snapshot["complete"] for snapshot in first), "the size of the first round is announced"


def test_a_wrong_setting_is_refused_in_one_line(openrlhf_job):
    job = openrlhf_job("--sglang_pat.polcy", "pat", fails=True)
    assert job.log.splitlines()[-1].startswith(
        "error: --sglang_pat has no setting 'polcy' (did you mean 'policy'?); choose from"
    )


def test_a_job_killed_in_the_compiler_does_not_hold_up_the_next(tmp_path):
    """A killed job leaves torch's lock file; whoever finds one waits for it without an end."""
    first, second = tmp_path / "first", tmp_path / "second"
    (deepspeed_ops.copied(first) / "fused_adam" / "lock").touch()
    assert (deepspeed_ops.copied(second) / "fused_adam" / "fused_adam.so").exists()
    assert not list(second.rglob("lock"))
