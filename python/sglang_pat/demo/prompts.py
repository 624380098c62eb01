"""The work of the demonstration: chat prompts whose answers differ much in length."""

from __future__ import annotations

import random
from dataclasses import dataclass

# Greedy answers of SmolLM2-135M-Instruct: 8 to about 160 tokens, and a few that go on to the limit. The order
# spreads short and long ones; the first 16 are the default batch.
PROMPTS = (
    "What causes the seasons?",
    "What is the capital of France?",
    "Is a tomato a fruit or a vegetable?",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "What does CPU stand for?",
    "List five fruits, separated by commas.",
    "How does a refrigerator work?",
    "What is the opposite of 'ancient'?",
    "Explain in two sentences why the sky is blue.",
    "Hi! How are you today?",
    "What is photosynthesis? Answer in one sentence.",
    "Who was Marie Curie?",
    "Define the word 'entropy' in simple terms.",
    "Write a one-sentence summary of Romeo and Juliet.",
    "What is the boiling point of water in Celsius?",
    "Write a polite reply declining a meeting invitation.",
    "Tell me a joke about computers.",
    "Describe a typical day in ancient Rome.",
    "What is the largest ocean?",
    "Write a product description for a wooden desk lamp.",
    "Suggest a name for a small bakery.",
    "Summarize the water cycle in three sentences.",
    "What is the difference between a list and a tuple in Python?",
    "Translate 'good morning' into Spanish.",
    "Which is larger, a whale or a mouse?",
    "Is the sun a star or a planet? Answer in one sentence.",
    "Write a tweet announcing a new coffee shop.",
    "Complete the sentence: The early bird",
    "How many legs does a spider have?",
    "Give me a synonym for 'happy'.",
    "Name three primary colours.",
    "What day comes after Tuesday?",
)


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
