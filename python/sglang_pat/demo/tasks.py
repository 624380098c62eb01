"""The work of the demonstration: chat prompts whose answers differ much in length."""

from __future__ import annotations

import random
from dataclasses import dataclass

from sglang_pat.tools.prompts import PROMPTS


@dataclass(frozen=True, kw_only=True)
class Task:
    """One chat request: what it asks, and how many tokens the answer may have (``exact``: has)."""

    prompt: str
    max_tokens: int
    exact: bool = False

    def body(self) -> dict:
        """The request for ``/v1/chat/completions``: greedy, streamed, with token counts in each chunk."""
        return {
            "model": "demo",
            "messages": [{"role": "user", "content": self.prompt}],
            "temperature": 0,
            "max_tokens": self.max_tokens,
            "ignore_eos": self.exact,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }


def natural_tasks(count: int, limit: int) -> list[Task]:
    """Answers end where the model ends them, at ``limit`` tokens at the latest."""
    return [Task(prompt=prompt, max_tokens=limit) for prompt in PROMPTS[:count]]


def fixed_tasks(count: int, limit: int, seed: int = 0) -> list[Task]:
    """Answers of long-tailed fixed lengths (log-normal), up to ``limit`` tokens: for random models."""
    rng = random.Random(seed)
    draws = [rng.lognormvariate(0.0, 0.9) for _ in range(count)]
    lengths = [max(limit // 8, round(limit * draw / max(draws))) for draw in draws]
    return [
        Task(prompt=prompt, max_tokens=length, exact=True)
        for prompt, length in zip(PROMPTS[:count], lengths, strict=True)
    ]
