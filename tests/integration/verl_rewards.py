"""Rewards of a job in which some groups are useless, by the hash of a prompt: all its responses have the same."""

from __future__ import annotations

from hashlib import sha256


def draw(text: str) -> float:
    """From 0 to 1, by a hash."""
    return int.from_bytes(sha256(text.encode()).digest()[:4], "big") / 2**32


def _score(share: float, response: str, prompt: int) -> float:
    return 1.0 if draw(f"prompt {prompt}") < share else draw(response)


def half(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> float:
    return _score(0.5, solution_str, extra_info["index"])


def most(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> float:
    return _score(0.8, solution_str, extra_info["index"])
