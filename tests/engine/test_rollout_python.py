"""Rounds on a real engine, from Python: ``Engine.rollout``; and that a client's are the same."""

from __future__ import annotations

import json

from .rollout_calls import admitter, idle, one_round, prompts, reached, schedule, tokens

SAMPLINGS = {
    "greedy": {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True},
    "penalised": {"temperature": 0, "frequency_penalty": 0.7, "max_new_tokens": 60, "ignore_eos": True},
}

SCRIPT = """
import json
import sglang_pat
from sglang_pat.launch import processes
from sglang_pat.rollout.admitter import Admitter
from sglang_pat.rollout.records import Group, Summary
from sglang_pat.rollout.rules import Rules

if __name__ == "__main__":
    processes.fork_here()
    engine = sglang_pat.Engine(
        model_path={model!r}, tp_size=1, dp_size=2, adaptive_tp=True, pat_policy="schedule", dtype="float32",
        max_total_tokens=20000, log_level="error",
    )
    sampling = {{"temperature": 1.0, "max_new_tokens": 100, "stop_token_ids": list(range(100, 124))}}

    def check_idle():
        # The flush waits until the ranks have ended what was aborted; their load is reported before it is answered.
        assert engine.loop.run_until_complete(engine.tokenizer_manager.flush_cache(timeout_s=60)).success
        status = engine.status()
        assert status["requests"] == 0 and status["rounds"]["open"] == [], "nor is a round"

    told, tell = [], engine.tokenizer_manager.pat_round
    engine.tokenizer_manager.pat_round = lambda message: (told.append(message), tell(message))
    for mode in ("strict", "reorder", "partial"):
        rules = Rules(mode=mode, num_prompts=3, num_responses=2, eta_prompts=1.5, max_staleness=2, filter_groups=True)
        admitter = Admitter(rules)
        admitter.feed([((0, i), {{"input_ids": [10 + i, 20, 30 + i]}}) for i in range(10)], end_of=0)
        useless = []

        def judge(group):
            if group.index % 4 == 3:
                useless.append(group.index)
            return group.index % 4 != 3

        returned, rounds = [], 0
        while admitter.state.fresh or admitter.state.waiting:
            for event in engine.rollout(admitter, sampling, version=rounds, judge=judge):
                if isinstance(event, Group):
                    returned.append(event.index)
            assert isinstance(event, Summary)
            rounds += 1
        assert sorted(returned + useless) == list(range(10)), (mode, returned, useless)
        check_idle()
        print(mode, "rounds", rounds)
    admitter = Admitter(Rules(num_prompts=2, num_responses=1, eta_responses=1.0))
    admitter.feed([((0, i), {{"input_ids": [10 + i, 20, 30 + i]}}) for i in range(4)])
    events = engine.rollout(admitter, sampling, version=0)
    next(events)
    events.close()
    assert admitter.state.round is None
    assert len(admitter.state.fresh) + len(admitter.state.waiting) + admitter.state.returned == 4
    check_idle()
    assert not engine.tokenizer_manager.rid_to_state
    *_, begun, ended = told
    assert (begun.requests, begun.prompts, begun.prompt_tokens, begun.max_new_tokens) == (3, 3, 3, 100)
    assert ended.name == begun.name and len(told) % 2 == 0, "of each round the engine is told"
    engine.begin_round(6, prompts=2, name="mine")
    assert engine.status()["rounds"]["missing"] == 6
    engine.end_round("mine")
    assert engine.status()["rounds"] == {{"open": [], "missing": 0, "start": 1}}
    try:
        engine.begin_round(6, prompts=7)
    except ValueError as error:
        assert str(error) == "prompts is 7, of 6 requests: give at most as many"
    for name, sampling in {samplings!r}.items():
        admitter = Admitter(Rules(num_prompts=3, num_responses=2, eta_prompts=1.0))
        admitter.feed({prompts!r}, end_of=0)
        *groups, _ = engine.rollout(admitter, sampling, version=0)
        print(json.dumps(sorted([g.index, s.number, s.output.token_ids] for g in groups for s in g.kept())))
    engine.shutdown()
    print("done")
"""


def test_engine_rollout_and_a_client_give_the_same_texts(server, servers, llama, tmp_path):
    """Greedy (SGLang's seeds are for one layout only), the client's through switches."""
    script = SCRIPT.format(model=str(llama), samplings=SAMPLINGS, prompts=prompts(0, 1, 2))
    (tmp_path / "rounds_of_python.py").write_text(script)
    found = servers.run("rounds_of_python", env={"PYTHONPATH": str(tmp_path)}, seconds=500)
    assert found.returncode == 0, found.stderr[-3000:]
    *lines, done = found.stdout.strip().splitlines()
    assert done == "done"
    for sampling, line in zip(SAMPLINGS.values(), lines[-2:], strict=True):
        schedule(server, {"tp": 2, "arrived": 6, "step": 10}, {"tp": 1, "step": 40})
        groups, _ = one_round(server, admitter(0, 1, 2, eta_prompts=1.0), sampling)
        assert len(reached(server)["switches"]) == 2
        assert sorted([*key, ids] for key, ids in tokens(groups).items()) == json.loads(line)
    idle(server)
