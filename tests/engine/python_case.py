"""Run by test_python_api.py as a program of its own: a trainer that switches its engine, and asks it for rounds."""

from __future__ import annotations

import asyncio
import json
import sys
import threading

import psutil
from safetensors.torch import load_file

import sglang_pat
from sglang_pat.launch import processes
from sglang_pat.layout import ParallelLayout
from sglang_pat.messages import EndRound
from sglang_pat.rollout.records import Group, Summary
from sglang_pat.rollout.rounds import WeightsChanged

from .rollout_calls import SAMPLING, admitter, tokens
from .streams import GREEDY

SECONDS = 400
"""Seconds after which an engine hangs; what is waited for comes."""
FOREVER = {"temperature": 1.0, "max_new_tokens": 3000, "ignore_eos": True}
PAIR = {"num_prompts": 2, "num_responses": 1, "eta_responses": 1.0}


class Case:
    def __init__(self, engine) -> None:
        self.engine = engine
        self.done, self.manager = engine.loop.run_until_complete, engine.tokenizer_manager
        self.told, tell = [], self.manager.pat_send_round
        self.round_ended = threading.Event()

        def send(message) -> None:
            self.told.append(message)
            tell(message)
            if isinstance(message, EndRound):
                self.round_ended.set()

        self.manager.pat_send_round = send

    def switches(self) -> None:
        """Switch in the middle of requests: they answer what they answer without."""
        from sglang_pat.server.engine import ReconfigureError

        assert (self.engine.layout.tp, self.engine.layout.dp) == (1, 2)
        asked = {"input_ids": [[6 + i, 70, 80] for i in range(3)], "sampling_params": GREEDY | {"max_new_tokens": 120}}

        async def switching():
            await self.manager.pat_set_schedule([{"arrived": 3}, {"tp": 2, "step": 20, "hold": True}])
            work = asyncio.ensure_future(self.engine.async_generate(**asked))
            await self.manager.pat_get_schedule()
            records = [await self.engine.async_reconfigure(tp) for tp in (1, 2)]
            await self.manager.pat_set_schedule([])
            return await work, records

        answers, records = self.done(switching())
        assert [record["requests"] for record in records] == [3, 3]
        said = [[answer["output_ids"] for answer in found] for found in (answers, self.engine.generate(**asked))]
        assert said[0] == said[1]
        try:
            self.engine.reconfigure(tp=3)
        except ReconfigureError as error:
            assert error.code == 400
        assert self.engine.reconfigure(tp=1)["to_tp"] == 1
        status, info = self.engine.status(), self.engine.get_server_info()
        assert status["layout"] == {"tp": 1, "dp": 2} and status["num_switches"] == 4
        assert (info["tp_size"], info["dp_size"]) == (2, 1)

    def lends(self) -> None:
        """Lend from either degree: the layout says so, and the answers are the same."""
        from sglang_pat.server.engine import ReconfigureError

        asked = dict(input_ids=[[7, 8, 9], [9, 8, 7]], sampling_params=GREEDY | {"max_new_tokens": 20})
        want = [answer["output_ids"] for answer in self.engine.generate(**asked)]
        for tp in (1, 2):
            self.engine.reconfigure(tp)
            record = self.engine.lend_ranks()
            assert (record["lent"], record["released_bytes"]) == ([1], 0)
            assert self.engine.layout == ParallelLayout(1, 2, stride=2)
            assert [answer["output_ids"] for answer in self.engine.generate(**asked)] == want
            try:
                self.engine.reconfigure(2)
            except ReconfigureError as error:
                assert error.code == 400 and "too few ranks work, 1 of 2" in str(error), error
            assert self.engine.take_back_ranks()["lent"] == self.engine.status()["lent"] == []
            assert self.engine.take_back_ranks() == {}

    def injects(self) -> None:
        """Prefixes that nobody computes: what is there already stays, and too many do no harm."""

        def prefilled():
            self.engine.trace()
            answers = self.engine.generate(input_ids=long, sampling_params=GREEDY | {"max_new_tokens": 4})
            steps = [step["tokens"] for step in self.engine.trace() if step["kind"] == "prefill"]
            return [answer["output_ids"] for answer in answers], sum(steps)

        long = [[6 + i] * 300 for i in range(4)]
        self.engine.flush_cache()
        honest = prefilled()
        assert honest[1] == 4 * 300
        self.engine.flush_cache()
        for _ in range(2):
            self.engine.inject_prefixes(long)
        assert prefilled()[1] == 4
        self.engine.inject_prefixes([[200 + i] * 6000 for i in range(8)])  # more than the pool holds
        self.engine.flush_cache()
        assert prefilled() == honest

    def check_idle(self) -> None:
        # The flush waits until the ranks have ended what was aborted; their load is reported before it is answered.
        assert self.done(self.manager.flush_cache(timeout_s=60)).success
        status = self.engine.status()
        assert status["requests"] == 0 and status["rounds"] == {"open": [], "missing": 0, "start": 1}
        assert not self.manager.rid_to_state
        assert "engine loop" not in {thread.name for thread in threading.enumerate()}

    def modes(self) -> None:
        """Each prompt comes once, or is useless."""
        for mode in ("strict", "reorder", "partial"):
            mine = admitter(*range(10), end=True, mode=mode, max_staleness=2, filter_groups=True)
            useless, returned, rounds = [], [], 0

            def judge(group, useless=useless):
                if group.index % 4 == 3:
                    useless.append(group.index)
                return group.index % 4 != 3

            while mine.state.fresh or mine.state.waiting:
                *groups, summary = self.engine.rollout(mine, SAMPLING, version=rounds, judge=judge)
                assert isinstance(summary, Summary)
                returned += [group.index for group in groups]
                rounds += 1
            assert sorted(returned + useless) == list(range(10)), (mode, returned, useless)
            self.check_idle()

    def left(self) -> None:
        mine = admitter(*range(4), **PAIR | {"eta_prompts": 1.0})
        events = self.engine.rollout(mine, SAMPLING, version=0)
        next(events)
        events.close()
        assert mine.state.round is None
        assert len(mine.state.fresh) + len(mine.state.waiting) + mine.state.returned == 4
        self.check_idle()
        # Of each round the engine is told, and of its end.
        begun, ended = self.told[-2:]
        assert (begun.requests, begun.prompts, begun.max_new_tokens) == (2, 2, SAMPLING["max_new_tokens"])
        assert ended.name == begun.name and len(self.told) % 2 == 0

    def trained(self) -> None:
        """Take events as if the first one were trained on for as long as the whole round takes."""
        mine = admitter(*range(4), **PAIR | {"eta_prompts": 2.0})
        events = self.engine.rollout(mine, SAMPLING, version=0)
        self.round_ended.clear()
        assert isinstance(next(events), Group)
        assert self.round_ended.wait(SECONDS), "the engine is frozen while its user trains"
        _, summary = events
        assert summary.returned == 2
        self.check_idle()

    def asked(self) -> None:
        """Ask the lending policy in the middle of a round."""
        mine = admitter(*range(4), **PAIR | {"eta_prompts": 2.0})
        events = self.engine.rollout(mine, FOREVER | {"max_new_tokens": 200}, version=1)
        assert isinstance(next(events), Group)
        assert self.engine.reconfigure(tp=2)["to_tp"] == 2
        assert self.engine.status()["layout"] == {"tp": 2, "dp": 1}
        answer = self.engine.generate(input_ids=[5, 6, 7], sampling_params=GREEDY | {"max_new_tokens": 5})
        assert answer["meta_info"]["completion_tokens"] == 5
        assert sum(event.returned for event in events if not isinstance(event, Group)) == 2
        self.engine.reconfigure(tp=1)

    def updated(self, model: str) -> None:
        """New weights end the round, and its prompts are where they were."""
        mine, raised = admitter(*range(4), **PAIR | {"eta_prompts": 2.0}), []

        def first() -> None:
            try:
                next(self.engine.rollout(mine, FOREVER, version=2))
            except WeightsChanged as error:
                raised.append(error)

        self.done(self.manager.pat_set_schedule([{"arrived": 4, "step": 5, "hold": True}]))
        thread = threading.Thread(target=first)
        thread.start()
        assert self.done(self.manager.pat_get_schedule())["holding"]
        assert self.engine.status()["requests"] == 4
        self.done(self.manager.pat_set_schedule([]))
        assert self.engine.update_weights_from_tensor(list(load_file(f"{model}/model.safetensors").items()))[0]
        thread.join(SECONDS)
        assert raised and mine.state.round is None and len(mine.state.fresh) == 4
        self.check_idle()

    def texts(self, samplings: str) -> None:
        for sampling in json.loads(samplings):
            mine = admitter(0, 1, 2, end=True, eta_prompts=1.0)
            *groups, _ = self.engine.rollout(mine, sampling, version=0)
            print(json.dumps(sorted([*key, ids] for key, ids in tokens(groups).items())))

    def killed(self) -> None:
        """Kill a rank while a thread has a round: the engine ends, as it does when the main thread runs the loop."""
        mine = admitter(*range(4), **PAIR | {"eta_prompts": 2.0})
        self.done(self.manager.pat_set_schedule([{"arrived": 4}]))
        threading.Thread(target=lambda: list(self.engine.rollout(mine, FOREVER, version=4)), daemon=True).start()
        self.done(self.manager.pat_get_schedule())
        assert self.engine.status()["requests"] == 4
        rank = next(child for child in psutil.Process().children(recursive=True) if "rank" in child.name())
        print("killed", flush=True)
        rank.kill()
        threading.Event().wait(SECONDS)
        print("still there")


def main(model: str, samplings: str) -> None:
    processes.fork_here()
    try:
        sglang_pat.Engine(model_path=model)
    except ValueError as error:
        assert "adaptive_tp=True" in str(error)
    case = Case(
        sglang_pat.Engine(
            model_path=model, tp_size=1, dp_size=2, adaptive_tp=True, pat_policy="schedule", dtype="float32",
            max_total_tokens=20000, random_seed=1, log_level="error",
        )
    )  # fmt: skip
    case.texts(samplings)
    case.switches()
    case.lends()
    case.injects()
    case.modes()
    case.left()
    case.trained()
    case.asked()
    case.updated(model)
    case.killed()


if __name__ == "__main__":
    main(*sys.argv[1:])
