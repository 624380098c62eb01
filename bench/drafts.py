"""How many drafted tokens are what a policy samples: for speculation without a draft model.

    python bench/drafts.py [--quick] [--models FOLDER ...] [--temperatures 1.0 0.7] [--json FILE]
    python bench/drafts.py --texts FILE [--models FOLDER]

Groups of responses to problems of ``gsm_symbolic`` (reasoning-gym), from an engine.  For the two longest of each group
the next ``k`` tokens are drafted at every step by the engine's ``Drafter``.  A drafted token counts if it is the one
that was sampled, as in a step of the engine that checks drafts.  Of several ``--models`` each is a later state of the
one before, and drafts from that one's responses to the same problem, too.

With ``--texts`` the responses are yours: a line of JSON for each prompt, ``{"prompt": "…", "responses": ["…", "…"]}``.
Drafts are for each of them, and the others have ended.  No engine is started.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, nan
from pathlib import Path
from statistics import mean
from typing import Any

import _bench
import msgspec
from rich.console import Console
from rich.progress import track
from rich.table import Table

from sglang_pat.speculate.acceptance import MATCHES
from sglang_pat.speculate.drafter import Drafter, count_right
from sglang_pat.testing import models
from sglang_pat.testing.server import Server
from sglang_pat.testing.smollm2 import load_transformers

LENGTHS = (2, 4, 8)
"""Drafted tokens of a step."""
TAIL = 2
"""Responses of a group that are drafted for; the others have ended."""


class Group(msgspec.Struct):
    """Responses to one prompt, and the probability with which each of their tokens was sampled, if it is known."""

    prompt: list[int]
    responses: list[list[int]]
    probabilities: list[list[float]] = []


class Texts(msgspec.Struct):
    """A line of ``--texts``."""

    prompt: str
    responses: list[str]


@dataclass(frozen=True)
class Step:
    """A step at a token of a response: how many tokens before it were equal, how many were drafted, and how many of
    them were right."""

    at: int
    match: int
    drafted: int
    right: int


def replay(prompt: Sequence[int], response: Sequence[int], ended: Sequence[Sequence[int]], count: int) -> list[Step]:
    """Steps in which ``response`` comes about if ``count`` tokens are drafted in each, from it and from ``ended``."""
    drafter, steps = Drafter(), []
    for number, other in enumerate(ended):
        drafter.end(0, f"ended {number}", prompt, other)
    at = 0
    while at < len(response):
        drafter.begin_step()
        match = drafter.find_match(0, "response", prompt, response[:at])
        drafted = drafter.draft(0, "response", prompt, response[:at], min(count, len(response) - at - 1))
        right = count_right(drafted, response[at:])
        steps.append(Step(at, match, len(drafted), right))
        at += right + 1
    return steps


def count_accepted(groups: Sequence[Group], before: Sequence[Group] | None, tail: int) -> list[dict[str, Any]]:
    """A row for each source and number of drafted tokens.  Drafts are for the ``tail`` longest of each group."""
    rows = []
    for name in ("itself", "and its siblings", "and those of the last epoch")[: 2 + bool(before)]:
        work: list[tuple[Group, int, list[list[int]]]] = []
        for number, group in enumerate(groups):
            order = sorted(range(len(group.responses)), key=lambda i: len(group.responses[i]))
            for i in order[-tail:]:
                others = order[:-tail] or [other for other in order if other != i]
                ended = [group.responses[other] for other in others] if name != "itself" else []
                if before and "epoch" in name:
                    ended += before[number].responses
                work.append((group, i, ended))
        for count in LENGTHS:
            steps: list[Step] = []
            pairs: list[tuple[float, float]] = []
            for group, i, ended in work:
                taken = replay(group.prompt, group.responses[i], ended, count)
                sure = mean(group.probabilities[i]) if group.probabilities else nan
                pairs.append((sure, len(group.responses[i]) / len(taken)))
                steps += taken
            rows.append(
                {
                    "drafts from": name, "k": count, "tokens a step": mean(step.right + 1 for step in steps),
                    "right": sum(step.right for step in steps) / max(sum(step.drafted for step in steps), 1),
                    "by position": {
                        at: mean(step.right + 1 for step in steps if at <= step.at < at + 100)
                        for at in range(0, max(step.at for step in steps) + 1, 100)
                    },
                    "steps, first draft right by match": {
                        least: (len(alike), mean(step.right > 0 for step in alike))
                        for least, most in zip(MATCHES, (*MATCHES[1:], inf), strict=True)
                        if (alike := [step for step in steps if step.drafted and least <= step.match < most])
                    },
                    "by response": pairs,
                }
            )  # fmt: skip
    return rows


def make_prompts(model: Path, problems: Sequence[str]) -> list[list[int]]:
    """Token ids of each problem, as a chat."""
    tokenizer = load_transformers().AutoTokenizer.from_pretrained(model)
    return [
        tokenizer.apply_chat_template([{"role": "user", "content": problem}], add_generation_prompt=True)["input_ids"]
        for problem in problems
    ]


def sample(model: Path, temperature: float, problems: Sequence[str], group: int, tokens: int) -> list[Group]:
    """Responses of an engine to each problem."""
    prompts = make_prompts(model, problems)
    sampling = {"temperature": temperature, "max_new_tokens": tokens, "n": group}
    groups = []
    with Server(model, "--tp", "1", "--dp", "2", "--adaptive-tp", max_total_tokens=65536) as server:
        for at in track(range(0, len(prompts), 8), f"{model.name}, temperature {temperature}"):
            some = prompts[at : at + 8]
            bodies = [{"input_ids": ids, "sampling_params": sampling, "return_logprob": True} for ids in some]
            for ids, answers in zip(some, server.generate(bodies), strict=True):
                pairs = [answer["meta_info"]["output_token_logprobs"] for answer in answers]
                groups.append(
                    Group(
                        ids,
                        [[token for _, token, _ in one] for one in pairs],
                        [[math.exp(logprob) for logprob, _, _ in one] for one in pairs],
                    )
                )
    return groups


def read_texts(file: Path, model: Path) -> list[Group]:
    """Groups of ``file``, see above, by the tokenizer of ``model``."""
    tokenizer = load_transformers().AutoTokenizer.from_pretrained(model)

    def encode(text: str) -> list[int]:
        return tokenizer(text)["input_ids"]

    lines = [msgspec.json.decode(line, type=Texts) for line in file.read_bytes().splitlines() if line.strip()]
    return [Group(encode(line.prompt), [encode(response) for response in line.responses]) for line in lines]


def draw_problems(count: int) -> list[str]:
    from reasoning_gym.factory import create_dataset

    entries = [entry["question"] for entry in create_dataset("gsm_symbolic", seed=46, size=2 * count)]
    return random.Random(46).sample(list(dict.fromkeys(entries)), count)


def show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    table = Table("drafts from", "k", "tokens a step", "right", title=title)
    for row in rows:
        table.add_row(row["drafts from"], str(row["k"]), f"{row['tokens a step']:.2f}", f"{row['right']:.2f}")
    Console(width=110).print(table)


def main() -> int:
    parser = _bench.options(__doc__, "two problems, four responses, one temperature; a minute")
    parser.add_argument("--models", nargs="+", type=Path, metavar="FOLDER", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[1.0, 0.7])
    parser.add_argument("--problems", type=int, default=48)
    parser.add_argument("--responses", type=int, default=8, help="to each problem (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=256, help="of a response at most (default: %(default)s)")
    parser.add_argument("--texts", type=Path, metavar="FILE", help="responses of your own")
    args = parser.parse_args()
    if args.quick:
        args.problems, args.responses, args.tokens, args.temperatures = 2, 4, 48, args.temperatures[-1:]
    machine, found = _bench.about(), {}
    folders = args.models or [models.make_smollm2(Path(".cache/models/smollm2"))]
    if args.texts:
        groups = read_texts(args.texts, folders[0])
        rows = count_accepted(groups, None, max(len(group.responses) for group in groups))
        show(f"{sum(len(one) for group in groups for one in group.responses)} tokens", rows)
        _bench.write(args.json, machine=machine, found={args.texts.name: {"rows": rows}})
        return 0
    problems = draw_problems(args.problems)
    for temperature in args.temperatures:
        before: list[Group] | None = None
        for folder in folders:
            groups = sample(folder, temperature, problems, args.responses, args.tokens)
            sampled = [p for group in groups for one in group.probabilities for p in one]
            rows = count_accepted(groups, before, TAIL)
            title = f"{folder.name}, temperature {temperature}: {len(sampled)} tokens of mean probability"
            show(f"{title} {mean(sampled):.3f}", rows)
            found[f"{folder.name} {temperature}"] = {"probability": mean(sampled), "rows": rows}
            _bench.write(args.json, machine=machine, found=found)
            before = groups
    return 0


if __name__ == "__main__":
    sys.exit(main())
