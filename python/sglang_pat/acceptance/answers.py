"""The steps that compare what is answered in each layout and across switches."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from profiler.worker import Worker
from sglang_pat.acceptance import commands
from sglang_pat.acceptance.bench import Bench
from sglang_pat.acceptance.results import Result
from sglang_pat.demo.cases import MAKERS, SMOLLM2
from sglang_pat.memory.memory_plan import GIB
from sglang_pat.memory.shapes import ModelShape, read_config
from sglang_pat.testing.smollm2 import NotInstalled
from sglang_pat.tools.prompts import PROMPTS

Ways = dict[str, tuple[int, list[int]]]
"""Ways to answer, by name: the degree to begin in, and the degrees to switch to."""
Outputs = dict[str, list[list[int]]]
"""Token ids of each answer, by way."""
ROUTED = "--enable-return-routed-experts"

FREED_SHARE = 0.9
"""Share of a lent rank's weights and KV by which the free memory of its GPU must grow.  Graphs and groups stay."""
SWITCHES, UPDATES = 20, 2
DRAFTS = 4
"""Drafts of a request in a step."""
QUESTIONS = 4
"""Number of questions to the real model, the first of ``tools.prompts``."""
QUESTION, WORD = "What is the capital of France?", "Paris"
"""One of these questions, and a word of its answer.  Without it the model does not work, however equal the answers."""


def read_degrees(worker: Worker) -> list[int]:
    return worker.do(commands.describe)["degrees"]


def order_degrees_up_and_down(degrees: list[int]) -> list[int]:
    """Degrees to switch to from the lowest one, up to the highest and back down."""
    return degrees[1:] + degrees[-2::-1]


class Generated(NamedTuple):
    """Answers in all ways.

    Attributes:
        routes: routed experts of each answer, base64, by way.
        moved: number of requests that moved with their KV.
    """

    outputs: Outputs
    routes: dict[str, list[str]]
    moved: int


def generate_in_all_ways(worker: Worker, prompts: list[list[int]], tokens: int, ways: Ways) -> Generated:
    """Greedy answers of ``tokens`` tokens in each way."""
    outputs, routes, moved = {}, {}, 0
    for name, (first, visits) in ways.items():
        answers = worker.do(commands.generate_greedy, prompts=prompts, answer=tokens, visits=visits, start=first)
        outputs[name], routes[name] = answers["outputs"], answers["routes"]
        moved += sum(record["migrated"] for record in answers["switches"])
    return Generated(outputs, routes, moved)


def compare_outputs(outputs: Mapping[str, Sequence]) -> tuple[bool, str]:
    """Whether all ways gave the answers of the first one, and what to say of it."""
    reference = next(iter(outputs.values()))
    different = [
        f"{name}, request {i}"
        for name, answers in outputs.items()
        for i, pair in enumerate(zip(answers, reference, strict=True))
        if pair[0] != pair[1]
    ]
    return not different, f"different: {', '.join(different)}" if different else "all equal"


def compare_likelihood(
    worker: Worker, prompts: list[list[int]], outputs: Outputs
) -> tuple[bool, str, dict[str, float]]:
    """Whether the last way, with switches, is as likely as the others; what to say, and nats a token by way."""
    nats = {
        name: statistics.mean(worker.do(commands.compute_nll, prompts=prompts, outputs=answers, tp=1))
        for name, answers in outputs.items()
    }
    *static, switched = nats.values()
    fine = switched <= max(static) + 3 * (max(static) - min(static)) + 0.02
    values = ", ".join(f"{name} {value:.4f}" for name, value in nats.items())
    return fine, f"{values} nats a token, judged by tp1", nats


def same_tokens(bench: Bench) -> Result:
    """float32: greedy tokens are equal in every layout, and with switches on the way."""
    return _compare_tokens(bench, bench.small)


def same_tokens_of_experts(bench: Bench) -> Result:
    """float32, a mixture of experts: greedy tokens are equal, and so are the experts that each was routed to."""
    return _compare_tokens(bench, bench.mixture, ROUTED)


def _compare_tokens(bench: Bench, model: Path, *flags: str) -> Result:
    worker, prompts = bench.start_exact_engine(model, *flags), bench.make_prompts(6, 40)
    degrees = read_degrees(worker)
    visits = order_degrees_up_and_down(degrees)
    tokens = bench.count_answer_tokens(len(visits))
    ways: Ways = {f"tp{tp}": (tp, []) for tp in degrees} | {"up": (1, degrees[1:]), "up and down": (1, visits)}
    outputs, routes, moved = generate_in_all_ways(worker, prompts, tokens, ways)
    fine, finding = compare_outputs(outputs)
    line = f"{len(prompts)} requests of {tokens} tokens in {len(ways)} ways, {moved} moved with their KV: {finding}"
    if ROUTED in flags:
        alike, finding = compare_outputs(routes)
        fine &= alike and all(all(one) for one in routes.values())
        line += f"; routed experts: {finding}"
    return Result(verdict="passed" if fine and moved else "failed", line=line)


def drafts(bench: Bench) -> Result:
    """float32: greedy tokens are equal with drafts, which are right the second time; and how long both ways take."""
    prompts, tokens, seconds = bench.make_prompts(4, 40), bench.count_answer_tokens(4), {}
    plain = bench.start_exact_engine(bench.small)
    degrees = read_degrees(plain)
    baselines = {tp: _time_greedy(plain, prompts, tokens, tp) for tp in degrees}
    worker = bench.start_exact_engine(bench.small, "--pat-speculate", str(DRAFTS))
    outputs = {"plain": baselines[degrees[0]][0]}
    for tp in degrees:
        outputs[f"tp{tp}"], _ = _time_greedy(worker, prompts, tokens, tp)
        outputs[f"tp{tp} again"], seconds[tp] = _time_greedy(worker, prompts, tokens, tp)
    visits = order_degrees_up_and_down(degrees)
    outputs |= generate_in_all_ways(worker, prompts, tokens, {"up and down": (1, visits)}).outputs
    counts = worker.do(commands.count_drafts)
    fine, finding = compare_outputs(outputs)
    gains = {f"tp{tp}": baselines[tp][1] / seconds[tp] for tp in degrees}
    line = f"{counts['right_drafts']} of {counts['drafts']} drafts right: {finding}; answers that are known "
    line += ", ".join(f"{gain:.2f} times as fast in {name}" for name, gain in gains.items())
    right = counts["right_drafts"] > len(prompts) * tokens / 2
    return Result(verdict="passed" if fine and right else "failed", line=line, figures={"gains": gains} | counts)


def _time_greedy(worker: Worker, prompts: list[list[int]], tokens: int, tp: int) -> tuple[list[list[int]], float]:
    """Greedy answers of degree ``tp``, and their seconds."""
    answers = worker.do(commands.generate_greedy, prompts=prompts, answer=tokens, visits=[], start=tp)
    return answers["outputs"], answers["seconds"]


def lent_ranks(bench: Bench) -> Result:
    """float32: greedy tokens are equal while half of the ranks are lent; on a GPU their memory is free meanwhile."""
    saver = ("--enable-memory-saver",) if bench.device == "cuda" else ()
    worker, prompts = bench.start_exact_engine(bench.small, *saver), bench.make_prompts(6, 40)
    tokens = bench.count_answer_tokens(2)
    reference = generate_in_all_ways(worker, prompts, tokens, {"tp1": (1, [])}).outputs["tp1"]
    rounds = [worker.do(commands.generate_while_lent, prompts=prompts, answer=tokens) for _ in range(3)]
    fine, finding = compare_outputs({"tp1": reference} | {f"round {i}": one["outputs"] for i, one in enumerate(rounds)})
    moved = sum(record["migrated"] for one in rounds for record in one["switches"])
    line = f"{len(rounds)} times lent and taken back, {moved} requests moved with their KV: {finding}"
    released = [one["switches"][0]["released_bytes"] for one in rounds]
    if saver:
        freed = [during - before for before, during in (one["free"] for one in rounds)]
        fine &= all(got >= FREED_SHARE * size > 0 for got, size in zip(freed, released, strict=True))
        line += f"; freed {min(freed) / GIB:.2f} GiB of {min(released) / GIB:.2f} GiB (bar {FREED_SHARE:.0%})"
    figures = {"records": [one["switches"] for one in rounds], "free": [one["free"] for one in rounds]}
    return Result(verdict="passed" if fine and moved else "failed", line=line, figures=figures)


def likelihood(bench: Bench) -> Result:
    """bfloat16: what is generated across switches is as likely as what is generated without."""
    return _compare_likelihood(bench, bench.small)


def likelihood_of_experts(bench: Bench) -> Result:
    """bfloat16, a mixture of experts: what is generated across switches is as likely as what is generated without."""
    if bench.device == "cpu":
        return Result(verdict="left out", line="the kernels for experts in bfloat16 need a GPU")
    return _compare_likelihood(bench, bench.mixture)


def _compare_likelihood(bench: Bench, model: Path) -> Result:
    worker, prompts = bench.start_engine(model, "--dtype", "bfloat16", *bench.few_graphs), bench.make_prompts(6, 40)
    degrees = read_degrees(worker)
    visits = order_degrees_up_and_down(degrees)
    ways: Ways = {f"tp{tp}": (tp, []) for tp in (degrees[0], degrees[-1])} | {"switched": (1, visits)}
    outputs = generate_in_all_ways(worker, prompts, bench.count_answer_tokens(len(visits)), ways).outputs
    fine, line, nats = compare_likelihood(worker, prompts, outputs)
    return Result(verdict="passed" if fine else "failed", line=line, figures={"nats": nats})


def steady(bench: Bench) -> Result:
    """Switches make no group, pool or graph, also after weight updates, and the new weights are in every layout."""
    worker, prompts = bench.start_exact_engine(bench.small), bench.make_prompts(4, 20)
    degrees = read_degrees(worker)
    shape = ModelShape.from_config(read_config(str(bench.small)))
    changed = {
        "model.layers.0.mlp.down_proj.weight": [shape.hidden, shape.intermediate],
        "model.layers.0.self_attn.q_proj.weight": [shape.heads * shape.head_dim, shape.hidden],
    }
    before, switches, memory = None, 0, []
    for number in range(UPDATES + 1):
        if number:
            worker.do(commands.update, names_and_shapes=changed, seed=number)
        visits = order_degrees_up_and_down(degrees) * (SWITCHES // (UPDATES + 1) // (2 * len(degrees) - 2) + 1)
        tokens = bench.count_answer_tokens(len(visits))
        switched = worker.do(commands.generate_greedy, prompts=prompts, answer=tokens, visits=visits, start=1)
        static = worker.do(commands.generate_greedy, prompts=prompts, answer=tokens, visits=[], start=degrees[-1])
        switches += len(switched["switches"])
        if switched["outputs"] != static["outputs"]:
            return Result(verdict="failed", line=f"tokens differ after {number} updates")
        if before == static["outputs"]:
            return Result(verdict="failed", line="an update changed nothing")
        memory = memory or bench.measure_memory(worker)  # what the first answers take is no growth
        before = static["outputs"]
    grown = max(now - then for now, then in zip(bench.measure_memory(worker), memory, strict=True))
    line = (
        f"{switches} switches and {UPDATES} weight updates: tokens equal; no switch made a group, a KV pool, a graph "
        f"or an attention backend; since before the updates the rank that grew most by {grown / 2**20:+.0f} MiB"
    )
    return Result(verdict="passed", line=line)


def real_model(bench: Bench) -> Result:
    """SmolLM2, with its real weights, answers questions in each layout and across switches."""
    try:
        model = MAKERS[SMOLLM2]()
    except NotInstalled as error:
        return Result(verdict="left out", line=str(error))
    dtype = "float32" if bench.device == "cpu" else "bfloat16"
    worker = bench.start_engine(model, "--dtype", dtype, *bench.few_graphs)
    taken = max(bench.measure_memory(worker))
    degrees, prompts = read_degrees(worker), worker.do(commands.make_chat_prompts, count=QUESTIONS)
    visits = order_degrees_up_and_down(degrees)
    tokens = bench.count_answer_tokens(len(visits))
    ways: Ways = {f"tp{tp}": (tp, []) for tp in degrees} | {"switched": (degrees[0], visits)}
    outputs, _, moved = generate_in_all_ways(worker, prompts, tokens, ways)
    if dtype == "float32":
        fine, finding = compare_outputs(outputs)
    else:
        fine, finding, _ = compare_likelihood(worker, prompts, outputs)
    texts = {name: worker.do(commands.decode_outputs, outputs=answers) for name, answers in outputs.items()}
    senseless = [name for name, answers in texts.items() if WORD not in answers[PROMPTS.index(QUESTION)]]
    line = (
        f"{SMOLLM2}, {dtype}: up in {worker.started_seconds:.0f} s, a rank takes {taken / GIB:.2f} GiB; "
        f"{QUESTIONS} answers of {tokens} tokens in {len(ways)} ways, {moved} moved with their KV: {finding}"
    )
    line += f"; no {WORD} in the answer to {QUESTION!r}: {', '.join(senseless)}" if senseless else ""
    figures = {"seconds": worker.started_seconds, "measured": taken, "texts": texts}
    rows = [["question", "answer, across switches"], *map(list, zip(PROMPTS, texts["switched"], strict=False))]
    return Result(
        verdict="passed" if fine and moved and not senseless else "failed", line=line, rows=rows, figures=figures
    )
