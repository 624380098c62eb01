"""``Engine.rollout`` while its user trains, asks, updates weights and leaves: the engine goes on in a thread."""

from __future__ import annotations

SCRIPT = """
import os, signal, threading, time
import psutil
from safetensors.torch import load_file
import sglang_pat
from sglang_pat.launch import processes
from sglang_pat.rollout.admitter import Admitter
from sglang_pat.rollout.records import Group
from sglang_pat.rollout.rounds import WeightsChanged
from sglang_pat.rollout.rules import Rules

SECONDS = 400
# For an engine that hangs: what is waited for comes, and stays until the script goes on.
FOREVER = {{"temperature": 1.0, "max_new_tokens": 3000, "ignore_eos": True}}


def admitter(number):
    made = Admitter(Rules(num_prompts=2, num_responses=1, eta_prompts=2.0, eta_responses=1.0))
    made.feed([((number, i), {{"input_ids": [10 + i, 20, 30 + i]}}) for i in range(4)])
    return made


def wait_for(what, holds):
    until = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < until, what
        time.sleep(0.001)


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "engine loop"]


if __name__ == "__main__":
    processes.fork_here()
    engine = sglang_pat.Engine(
        model_path={model!r}, tp_size=1, dp_size=2, adaptive_tp=True, pat_policy="schedule", dtype="float32",
        max_total_tokens=20000, log_level="error",
    )
    sampling = {{"temperature": 1.0, "max_new_tokens": 100, "stop_token_ids": list(range(100, 124))}}

    mine = admitter(0)
    for number, event in enumerate(engine.rollout(mine, sampling, version=0)):
        # As if the first event were trained on for as long as the whole round takes.
        wait_for("the engine is frozen while its user trains", lambda: mine.state.round is None)
    assert number == 2 and event.returned == 2
    assert not threads()
    print("trained")

    events = engine.rollout(admitter(1), FOREVER | {{"max_new_tokens": 200}}, version=1)
    assert isinstance(next(events), Group)
    assert engine.reconfigure(tp=2)["to_tp"] == 2
    assert engine.status()["layout"] == {{"tp": 2, "dp": 1}}
    answer = engine.generate(input_ids=[5, 6, 7], sampling_params={{"temperature": 0, "max_new_tokens": 5}})
    assert answer["meta_info"]["completion_tokens"] <= 5
    assert sum(event.returned for event in events if not isinstance(event, Group)) == 2
    engine.reconfigure(tp=1)
    print("asked")

    mine = admitter(2)
    events = engine.rollout(mine, FOREVER, version=2)
    first = threading.Thread(target=lambda: raised.append(next_of(events)))
    raised = []

    def next_of(events):
        try:
            return next(events)
        except WeightsChanged as error:
            return error

    weights = list(load_file({model!r} + "/model.safetensors").items())
    done, manager = engine.loop.run_until_complete, engine.tokenizer_manager
    done(manager.pat_set_schedule([{{"arrived": 4, "step": 5, "hold": True}}]))
    first.start()
    assert done(manager.pat_schedule())["holding"]
    assert engine.status()["requests"] == 4
    done(manager.pat_set_schedule([]))
    assert engine.update_weights_from_tensor(weights)[0]
    first.join(SECONDS)
    assert isinstance(raised[0], WeightsChanged), raised
    assert mine.state.round is None and len(mine.state.fresh) == 4
    assert engine.flush_cache().success and engine.status()["requests"] == 0
    print("updated")

    mine = admitter(3)
    events = engine.rollout(mine, sampling | {{"max_new_tokens": 50}}, version=3)
    next(events)
    events.close()
    assert mine.state.round is None and not threads()
    assert not engine.tokenizer_manager.rid_to_state
    print("left")

    greedy = {{"temperature": 0, "max_new_tokens": 30, "stop_token_ids": list(range(5, 500, 4))}}
    turns = []

    async def environment(turn):
        turns.append(turn)
        return [300 + turn.number, 301] if turn.number < 2 else None

    events = list(engine.rollout(admitter(5), greedy, version=4, environment=environment))
    for group in events[:-1]:
        output, at = group.kept()[0].output, 0
        for span in output.spans:
            if span.version is None:
                assert output.token_ids[at] in (300, 301) and output.logprobs[at] == 0
            else:
                assert span.version == 4
                # What SGLang says of the conversation so far.
                ids = group.prompt["input_ids"] + output.token_ids[:at]
                answer = engine.generate(input_ids=ids, sampling_params=greedy | {{"max_new_tokens": span.tokens}})
                assert answer["output_ids"] == output.token_ids[at:at + span.tokens]
            at += span.tokens
        assert at == len(output.token_ids) == len(output.logprobs) == len(output.mask())
        assert output.finish_reason == ("stop" if len(output.spans) == 5 else "length")
    assert max(turn.number for turn in turns) > 0
    print("answered")

    mine = admitter(4)
    first = threading.Thread(target=lambda: list(engine.rollout(mine, FOREVER, version=4)), daemon=True)
    first.start()
    wait_for("no request came", lambda: engine.status()["requests"] == 4)
    rank = next(child for child in psutil.Process().children(recursive=True) if "rank" in child.name())
    print("killed", flush=True)
    rank.kill()
    threading.Event().wait(SECONDS)
    print("still there")
"""


def test_a_rollout_in_a_thread(servers, llama, tmp_path):
    """The last rollout loses a rank: the engine ends, as it does when the main thread runs the loop."""
    (tmp_path / "rollout_in_a_thread.py").write_text(SCRIPT.format(model=str(llama)))
    found = servers.run("rollout_in_a_thread", env={"PYTHONPATH": str(tmp_path)}, seconds=500)
    assert found.stdout.split() == ["trained", "asked", "updated", "left", "answered", "killed"], found.stderr[-3000:]
    assert found.returncode == 1
