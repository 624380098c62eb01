"""The sweep on a real engine in CUDA's default configuration (``tests/rehearsal``): interrupted, resumed, validated.

On a CPU's own it runs in the acceptance (``test_acceptance.py``).
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections import defaultdict

import msgspec
import pytest

from profiler.grid import compute_length_needed
from sglang_pat.predict import profile as profiles
from sglang_pat.predict.cost import SwitchCosts
from sglang_pat.predict.predictor import Predictor
from sglang_pat.testing.prefork import popen

from .conftest import AS_ON_CUDA, count_start

BUDGET = "30m"
"""More than any machine needs for this grid: a sweep ends when it is done."""
CONTEXTS, LENGTHS = (64, 160), (64, 200)
GRID = "batch=1,4;context=64,160;lone=1;prefill_batch=1;prefill_length=64,200;switch_requests=4;switch_context=128"
"""The engine prefills 128 tokens a step: the longer prompts take two."""
SECONDS = 1000


def command(module, model, *arguments):
    """The module, and its arguments for an engine of two ranks."""
    flags = ["--model-path", model, "--tp", 1, "--dp", 2, "--dtype", "float32", "--max-total-tokens", 8192]
    return [*map(str, (module, *arguments, *flags, *AS_ON_CUDA))]


def keys(profile):
    decode = [("decode", p.tp, p.replicas, p.batch, p.context > 112) for p in profile.decode]
    return decode + [("prefill", p.tp, p.replicas, p.batch, p.length) for p in profile.prefill]


@pytest.fixture(scope="module")
def swept(llama, servers, tmp_path_factory):
    """(profile file, the profile when interrupted, output of the second run, what ranks captured and replayed)."""
    folder = tmp_path_factory.mktemp("profiler")
    path, log = folder / "profile.json", folder / "log.txt"
    before = set(servers.rehearsed.iterdir())
    count_start()
    module, *argv = command("profiler.sweep", llama, "--out", path, "--grid", GRID, "--budget", BUDGET)
    with log.open("w") as output:
        env = os.environ | servers.rehearsal
        process = popen(servers.prefork, module, argv, env, stdout=output, stderr=output)
        try:
            begin = time.monotonic()
            while not path.exists() or len(profiles.load(path).decode) < 3:
                assert process.poll() is None, log.read_text()
                assert time.monotonic() - begin < SECONDS, log.read_text()
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=500) == 130, log.read_text()
        finally:
            process.kill()
    assert "the same command goes on" in log.read_text()
    interrupted = profiles.load(path)
    again = servers.run(module, *argv, env=servers.rehearsal)
    assert again.returncode == 0, again.stdout + again.stderr
    files = set(servers.rehearsed.iterdir()) - before
    return path, interrupted, again.stdout, [json.loads(line) for f in files for line in f.read_text().splitlines()]


def test_an_interrupted_sweep_goes_on_where_it_was(swept):
    path, interrupted, output, _ = swept
    finished = profiles.load(path)
    assert 3 <= len(interrupted.decode) < len(finished.decode) and not interrupted.complete
    for before, after in zip(interrupted.decode, finished.decode, strict=False):
        same = msgspec.structs.replace(before, samples=after.samples, seconds=after.seconds)
        assert same == after and after.samples[: len(before.samples)] == before.samples, "a measurement was lost"
    assert all(len(point.samples) >= 2 for point in finished.decode), "not visited twice"
    assert len(keys(finished)) == len(set(keys(finished))), "a point was measured twice"
    assert finished.complete and finished.machine["sessions"] == 2
    assert f"{len(interrupted.decode)} measured before" in output
    assert finished.machine["spent_seconds"] > interrupted.machine["spent_seconds"]


def test_every_point_is_measured_and_is_what_was_asked_for(swept):
    profile, events = profiles.load(swept[0]), swept[3]
    assert {(event["tp"], event["batch"]) for event in events if event["event"] == "replay"} >= {(1, 4), (2, 4)}
    decode = {(p.tp, p.replicas, p.batch, min(CONTEXTS, key=lambda c: abs(c - p.context))) for p in profile.decode}
    shapes = {(1, 2, 1), (1, 2, 4), (1, 1, 1), (2, 1, 1), (2, 1, 4)}
    assert decode == {(*shape, context) for shape in shapes for context in CONTEXTS}
    off = {(p.tp, p.replicas, p.batch, p.context): min(abs(p.context - c) for c in CONTEXTS) for p in profile.decode}
    # The window begins when the last request of the batch has begun, and ends with the answers.
    assert max(off.values()) <= compute_length_needed(0), off
    assert {(p.tp, p.batch, p.length) for p in profile.prefill} == {(tp, 1, n) for tp in (1, 2) for n in LENGTHS}
    assert profile.complete and profile.machine["failed"] == profile.machine["left_out"] == 0
    moved = [s for s in profile.switches if s.requests]
    assert {(s.from_tp, s.to_tp) for s in moved} == {(1, 2), (2, 1)}
    assert all(s.requests == 4 and s.tokens >= 4 * 120 and s.moved_bytes > 0 for s in moved)
    predictor = Predictor(profile)
    changes = defaultdict[tuple[int, int], list[float]](list)
    for point in profile.decode:
        seconds = predictor.step_seconds(point.tp, point.batch, point.batch * point.context, point.replicas)
        assert 1e-4 < seconds < 5
        changes[point.tp, point.replicas].append(math.log(seconds / point.seconds))
    # A step that took less time than one of fewer tokens is noise, which is spread over both.
    assert all(sum(logs) == pytest.approx(0, abs=0.01) for logs in changes.values()), changes
    assert predictor.prefill_uniform(2, 2, 84) > 0
    assert 0 < SwitchCosts(profile, predictor).estimate(1, 2, [100, 200]).seconds < 10


@pytest.mark.long
def test_validation_of_a_real_batch(swept, servers, llama, tmp_path):
    extra = ["--requests", 8, "--max-new-tokens", 48, "--out", tmp_path / "out"]
    result = servers.run(*command("profiler.validate", llama, swept[0], *extra), env=servers.rehearsal)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "tp1×dp2" in result.stdout and "tp2×dp1" in result.stdout
    found = json.loads((tmp_path / "out" / "validation.json").read_text())
    assert set(found["slowness"]) == set(found["between"]["beside"]) == {"tp1×dp2", "tp2×dp1"}
    # A loaded machine may be far off; what must hold is that all runs were compared.
    assert all(len(runs) == 3 and all(0.02 < run < 50 for run in runs) for runs in found["slowness"].values())
    assert f"{100 * found['between']['error']:.1f} %" in result.stdout
