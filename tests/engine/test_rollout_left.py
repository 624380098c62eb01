"""Clients that die, and trainers that go on in another process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from sglang_pat.rollout.admitter import Admitter

from .rollout_calls import admitter, idle, one_round, prompts, reached, schedule, tokens

ROOT = Path(__file__).resolve().parents[2]

DYING = """
import sys
from sglang_pat.rollout.client import RolloutClient
from tests.engine.rollout_calls import admitter

long = {"temperature": 0, "max_new_tokens": 3000, "ignore_eos": True}
list(RolloutClient(sys.argv[1]).rollout(admitter(*range(5)), long, version=0))
"""

GOING_ON = """
import json, sys
from tests.engine.rollout_calls import admitter, prompts, tokens
from sglang_pat.rollout.client import RolloutClient

url, file, sampling = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
mine = admitter(num_responses=1)
with open(file, "rb") as saved:
    mine.load_state_dict({"admitter": saved.read()}, file)
for version in (2, 3):
    mine.feed(prompts(*range(5 * version, 5 * version + 5)))
    *groups, _ = RolloutClient(url).rollout(mine, sampling, version=version)
    print(json.dumps(sorted([*key, ids] for key, ids in tokens(groups).items())))
"""


def client(code: str, *words: str) -> subprocess.Popen:
    env = os.environ | {"PYTHONPATH": f"{ROOT / 'python'}:{ROOT}"}
    return subprocess.Popen([sys.executable, "-c", code, *words], cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)


def test_a_client_that_dies_leaves_no_request_running(server):
    """It says nothing: its connections break, and the server aborts what came over them."""
    schedule(server, {"arrived": 10, "step": 60, "hold": True})
    process = client(DYING, server.url)
    reached(server)
    assert server.status()["requests"] == 10 and server.status()["rounds"]["open"]
    process.kill()
    process.wait()
    schedule(server)
    begun = time.monotonic()
    while server.status()["requests"]:
        assert time.monotonic() < begun + 60
        time.sleep(0.2)
    # The next round of this name takes the place of the one that nobody ends.
    one_round(server, admitter(*range(5)))
    idle(server)


def test_a_trainer_goes_on_in_another_process(server, tmp_path):
    """From its checkpoint: the same groups and, greedily, the same tokens as without the restart."""
    sampling = {"temperature": 0, "max_new_tokens": 30, "ignore_eos": True}
    mine, saved, course = admitter(num_responses=1), b"", []
    for version in range(4):
        if version == 2:
            saved = mine.state_dict()["admitter"]
        mine.feed(prompts(*range(5 * version, 5 * version + 5)))
        groups, _ = one_round(server, mine, sampling, version=version)
        course.append(sorted([*key, ids] for key, ids in tokens(groups).items()))
    (tmp_path / "state").write_bytes(saved)
    process = client(GOING_ON, server.url, str(tmp_path / "state"), json.dumps(sampling))
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    again = [json.loads(line) for line in said.splitlines()]
    assert [len(groups) for groups in again] == [3, 3]
    returned = {group[0] for groups in course[:2] for group in groups}
    assert not returned & {group[0] for groups in again for group in groups}, "none comes twice"
    known = {(index, number): ids for groups in course for index, number, ids in groups}
    for index, number, ids in (response for groups in again for response in groups):
        assert known.get((index, number), ids) == ids
    here = Admitter(mine.rules)
    here.load_state_dict({"admitter": saved})
    assert here.state_dict()["admitter"] == saved
    idle(server)
