"""The real part of ``bench/tail_batching.py``: rounds of SmolLM2 on this machine."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

import requests
import rollout
from rich.console import Console
from rich.table import Table

from sglang_pat.demo.cases import MAKERS, QUICK
from sglang_pat.demo.contest import KV_TOKENS, RANKS
from sglang_pat.demo.display import Display
from sglang_pat.testing.server import Server, sent_event, stopped
from sglang_pat.tools.machine import machine
from sglang_pat.tools.prompts import PROMPTS

NUM_PROMPTS, NUM_RESPONSES = 4, 2
LIMIT = 192
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


@dataclass
class Contender:
    """A way to make rounds.  ``eta``: of prompts and of responses."""

    name: str
    server: Server
    eta: tuple[float, float]
    given: int = 0
    rounds: list[dict[str, Any]] = field(default_factory=list)

    def round(self, number: int) -> None:
        """One round: seconds, kind, each response's length, whether it ended by itself, its mean log-prob."""
        prompts = [] if self.rounds and self.rounds[-1]["waiting"] >= 2 * NUM_PROMPTS else self._prompts()
        body = {
            "job": self.name.replace(" ", "-").replace(",", ""), "prompts": prompts, "version": number,
            "num_prompts": NUM_PROMPTS, "num_responses": NUM_RESPONSES,
            "eta_prompts": self.eta[0], "eta_responses": self.eta[1],
            "sampling_params": {"temperature": 1.0, "max_new_tokens": LIMIT},
        }  # fmt: skip
        before = self.server.status()["num_switches"]
        began = time.monotonic()
        responses, summary = [], {}
        with requests.post(f"{self.server.url}/pat/rollout", json=body, stream=True, timeout=600) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                found = sent_event(line) or {}
                if found.get("type") == "group":
                    responses += found["responses"]
                elif found.get("type") == "round":
                    summary, seconds = found, time.monotonic() - began
                elif found.get("type") == "error":
                    raise RuntimeError(found["message"])
        self.rounds.append(
            {
                "seconds": seconds, "kind": summary["kind"], "thrown": summary["thrown"],
                "waiting": len(summary["ages"]), "switches": self.server.status()["num_switches"] - before,
                "lengths": [len(r["token_ids"]) for r in responses],
                "ended": [r["finish_reason"] == "stop" for r in responses],
                "logprobs": [mean(r["logprobs"]) for r in responses],
            }
        )  # fmt: skip

    def _prompts(self) -> list[dict[str, Any]]:
        count = round(self.eta[0] * NUM_PROMPTS)
        mine = range(self.given, self.given + count)
        self.given += count
        texts = {i: CHAT.format(PROMPTS[i % len(PROMPTS)]) for i in mine}
        return [{"key": [0, i], "text": text} for i, text in texts.items()]


def run(console: Console, quick: bool) -> dict:
    """All contenders, round by round in turn."""
    case, budget, rounds = (QUICK["quick"], "20s", 2) if quick else (rollout.REGIMES["smollm2"], "5m", 10)
    model = MAKERS[case.model]()
    profile = rollout.sweep(case, model, budget, Display(console))
    with ExitStack() as stack:
        servers: list[Server] = []
        for flags in (["--pat-policy", "off"], ["--pat-policy", "survival", "--pat-profile", str(profile)]):
            with stopped(*servers):
                made = Server(model, *RANKS, "--adaptive-tp", *flags, max_total_tokens=KV_TOKENS)
                servers.append(stack.enter_context(made))
        contenders = [
            Contender("without", servers[0], (1.0, 1.0)),
            Contender("tail batching", servers[0], (1.25, 1.25)),
            Contender("tail batching, adaptive", servers[1], (1.25, 1.25)),
            Contender("prompts only", servers[0], (1.25, 1.0)),
        ]
        for number in range(1 + rounds):  # the first one does not count
            for contender in contenders:
                with stopped(*(server for server in servers if server is not contender.server)):
                    contender.round(number)
            shown = ", ".join(f"{c.name} {c.rounds[-1]['seconds']:.1f} s ({c.rounds[-1]['kind']})" for c in contenders)
            console.print(f"  round {number}: {shown}")
    about = machine()
    result = {
        "machine": about, "num_prompts": NUM_PROMPTS, "num_responses": NUM_RESPONSES, "limit": LIMIT,
        "contenders": {c.name: c.rounds[1:] for c in contenders},
    }  # fmt: skip
    show(console, result)
    return result


def show(console: Console, result: dict) -> None:
    table = Table(title="real rounds; lengths in tokens", title_justify="left")
    for column in (
        "", "seconds a round", "short", "long", "tokens thrown away", "switches", "length, mean",
        "length, short rounds", "length, long rounds", "ended by themselves", "log-prob of a token",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for name, rounds in result["contenders"].items():
        by_kind = {kind: [r for r in rounds if r["kind"] == kind] for kind in ("short", "long")}
        kept = sum(sum(r["lengths"]) for r in rounds)
        thrown = sum(r["thrown"] for r in rounds)
        every = {key: [x for r in rounds for x in r[key]] for key in ("lengths", "ended", "logprobs")}
        table.add_row(
            name, f"{mean(r['seconds'] for r in rounds):.1f} ({median(r['seconds'] for r in rounds):.1f})",
            *(f"{len(found)}" for found in by_kind.values()), f"{thrown / (thrown + kept):.0%}",
            f"{sum(r['switches'] for r in rounds)}", f"{mean(every['lengths']):.0f}",
            *(f"{mean([x for r in found for x in r['lengths']] or [float('nan')]):.0f}" for found in by_kind.values()),
            f"{mean(every['ended']):.0%}", f"{mean(every['logprobs']):.3f}",
        )  # fmt: skip
    console.print(table)
