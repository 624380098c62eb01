"""A reward that a small model learns within a few steps: the share of vowels in the text."""

import torch


def reward_func(queries, prompts, labels, **kwargs):
    shares = [sum(letter in "aeiou" for letter in text) / max(1, len(text)) for text in queries]
    rewards = torch.tensor(shares)
    return {"rewards": rewards, "scores": rewards, "extra_logs": {}}
