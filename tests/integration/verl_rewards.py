"""Rewards of a job in which some groups are useless, by the hash of a prompt: all its responses have the same."""

from __future__ import annotations

from hashlib import sha256


def draw(text: str) -> float:
    """A number from 0 to 1, by a hash."""
    return int.from_bytes(sha256(text.encode()).digest()[:4], "big") / 2**32


def _score(share: float, response: str, prompt: int) -> float:
    return 1.0 if draw(f"prompt {prompt}") < share else draw(response)


def half(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> float:
    return _score(0.5, solution_str, extra_info["index"])


def most(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> float:
    return _score(0.8, solution_str, extra_info["index"])


def fails(response: str) -> bool:
    """Whether :func:`half_of_most` gives it no reward."""
    return draw(f"fate {response}") < 0.2


def half_of_most(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> float:
    """The reward :func:`half`, which fails for one response of five."""
    if fails(solution_str):
        raise ValueError("no reward")
    return _score(0.5, solution_str, extra_info["index"])


JUDGED_TOKENS = 48
"""Tokens of a response that a judge reads at most."""


async def ask_judge(
    data_source, solution_str, ground_truth, extra_info=None, *, reward_router_address, reward_model_tokenizer
) -> float:
    """The token that a generative reward model says to the beginning of a response."""
    import aiohttp

    tokens = reward_model_tokenizer.encode(solution_str)[:JUDGED_TOKENS]
    body = {"input_ids": tokens, "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}}
    async with aiohttp.ClientSession() as session:
        async with session.post(f"http://{reward_router_address}/generate", json=body) as answer:
            return float((await answer.json())["output_ids"][0])
