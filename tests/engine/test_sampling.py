"""Sampling at a temperature: the right distribution, the same tokens on all ranks of a group, other ones on others.

The servers compare the tokens of all ranks of a group in every step (``conftest.CHECKS``): a difference ends the
engine, and so the test.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections import Counter

import pytest
from scipy.stats import chi2

from .conftest import long
from .streams import GREEDY, hold, switch, through, tokens

ALPHA = 1e-6
"""Level of each chi-square test: draws differ from run to run, and a wrong distribution gives far less."""

PROMPT = [17, 211, 43, 388, 92, 7, 151]


@pytest.fixture
def stock(servers, flat):
    return servers.stock(flat)


@pytest.fixture
def adaptive(servers, flat):
    return servers.adaptive(flat, 4, "--chunked-prefill-size", "128")


def body(prompt: list[int], new: int, temperature: float = 1.0, **params) -> dict:
    return {
        "input_ids": prompt,
        "sampling_params": GREEDY | {"temperature": temperature, "max_new_tokens": new} | params,
    }


def assert_distribution(counts: list[int], probabilities: list[float], what: str) -> None:
    """Chi-square test of ``counts``; cells that expect fewer than 8 are put together."""
    total = sum(counts)
    cells, rest = [], [0, 0.0]
    for count, probability in zip(counts, probabilities, strict=True):
        if total * probability >= 8:
            cells.append((count, total * probability))
        else:
            rest = [rest[0] + count, rest[1] + total * probability]
    if rest[1] >= 8:
        cells.append(tuple(rest))
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells)
    p = chi2.sf(statistic, len(cells) - 1)
    print(f"{what}: chi-square {statistic:.1f}, {len(cells)} cells, {total} draws, p {p:.3g}")
    assert len(cells) >= 10 and p > ALPHA, what


@pytest.fixture(scope="module")
def exact(servers, flat) -> list[float]:
    """Probability of each token after :data:`PROMPT`, by the stock server."""
    ask = body(PROMPT, 1, temperature=0) | {"return_logprob": True, "token_ids_logprob": list(range(503))}
    (answer,) = servers.stock(flat).generate([ask])
    (entries,) = answer["meta_info"]["output_token_ids_logprobs"]
    probabilities = [math.exp(entry[0]) for entry in entries]
    assert [entry[1] for entry in entries] == list(range(503)) and abs(sum(probabilities) - 1) < 1e-4
    return probabilities


@pytest.mark.parametrize("tp", [2, long(4), long(1)])
def test_distribution_of_the_next_token(adaptive, exact, tp):
    """Chi-square test of 2,400 first tokens, drawn right after a switch."""
    adaptive.reconfigure(1)
    adaptive.reconfigure(4)
    adaptive.reconfigure(tp)
    answers = adaptive.generate([body(PROMPT, 1, n=100) for _ in range(24)])
    counts = Counter(copy["output_ids"][0] for answer in answers for copy in answer)
    assert_distribution([counts[token] for token in range(503)], exact, f"first token at tp {tp}")


def count_places(
    stock, prompts: list[list[int]], outputs: list[list[int]], rng: random.Random, temperature: float = 1.0
) -> list[int]:
    """Number of tokens that lie in each twentieth of their distribution, by the stock server.

    A token drawn from a distribution lies, on the scale of its cumulative probabilities (best token
    first), at a uniform place; those of all steps are independent.

    Args:
        temperature: up to 1; below it tokens behind the best forty are taken to have no share.
    """
    best_of = 24 if temperature == 1 else 40
    scored = stock.generate(
        [
            body(prompt + output, 1)
            | {"return_logprob": True, "logprob_start_len": len(prompt) - 1, "top_logprobs_num": best_of}
            for prompt, output in zip(prompts, outputs, strict=True)
        ]
    )
    cells = [0] * 20
    for output, score in zip(outputs, scored, strict=True):
        # The first entry is the last token of the prompt.
        best = score["meta_info"]["input_top_logprobs"][1:]
        for token, entries in zip(output, best, strict=True):
            low, high = 0.0, None
            whole = 1.0 if temperature == 1 else sum(math.exp(logprob / temperature) for logprob, *_ in entries)
            for logprob, other, _ in entries:
                share = math.exp(logprob / temperature) / whole
                if other == token:
                    high = low + share
                    break
                low += share
            place = rng.uniform(low, 1.0 if high is None else high)
            cells[min(int(place * len(cells)), len(cells) - 1)] += 1
    return cells


def test_distribution_in_mid_generation(adaptive, stock):
    """Tokens drawn before, between and after switches, against the exact distribution of each step."""
    rng = random.Random(1)
    prompts = [[*PROMPT, 5 + i] for i in range(24)]
    bodies = [body(prompt, 120) for prompt in prompts]
    answers, records = through(adaptive, bodies, {20: 2, 45: 4, 70: 1, 95: 2})
    assert [record["requests"] for record in records] == [len(bodies)] * 4
    cells = count_places(stock, prompts, [answer["output_ids"] for answer in answers], rng)
    assert sum(cells) == 24 * 120
    assert_distribution(cells, [1 / len(cells)] * len(cells), "tokens of 24 requests through four switches")


@pytest.mark.parametrize("seed", [0, long(1)])
async def test_ranks_agree_through_switches(adaptive, session, seed):
    """Every kind of sampler, with requests coming and going at each switch."""
    rng = random.Random(seed)
    kinds = [{}, {"top_p": 0.8}, {"top_k": 20}, {"min_p": 0.05}, {"temperature": 1.7}, {"temperature": 0}]
    bodies = [body([rng.randrange(5, 503)] * rng.randint(1, 90), rng.randint(60, 200), **k) for k in kinds * 3]
    late = [body([rng.randrange(5, 503)] * 40, rng.randint(1, 60), **kind) for kind in kinds * 2]
    tasks = await hold(adaptive, session, bodies, step=5)
    for tp, pair in zip((4, 2, 1, 2, 4, 1), zip(late[::2], late[1::2], strict=True), strict=True):
        # They come before the switch, or while it is made.
        tasks += [asyncio.ensure_future(adaptive.generate_one(session, each)) for each in pair]
        await switch(adaptive, session, tp)
        await adaptive.set_schedule(session, {"step": 8, "hold": True})
        await adaptive.wait_for_schedule(session)
    await adaptive.set_schedule(session)
    lengths = list(map(len, tokens(await asyncio.gather(*tasks))))
    assert lengths == [b["sampling_params"]["max_new_tokens"] for b in bodies + late]
    assert adaptive.process.poll() is None


@pytest.mark.parametrize("degrees", [long((1,)), long((2,)), (4, 1), long((4, 2))], ids=str)
async def test_replicas_draw_from_different_streams(adaptive, session, degrees):
    """Each group of a layout has one prompt, at the same time."""
    for tp in (1, *degrees):
        adaptive.reconfigure(tp)
    groups = 4 // degrees[-1]
    work = await hold(adaptive, session, [body(PROMPT, 200)] * groups, step=1)
    assert [group["running"] for group in adaptive.status()["groups"]] == [1] * groups
    await adaptive.set_schedule(session)
    for one, other in itertools.combinations(tokens(await asyncio.gather(*work)), 2):
        equal = sum(a == b for a, b in zip(one, other, strict=True))
        assert equal < 20, f"{equal} of 200 tokens are equal"
