"""The policy: a small Llama from scratch, its warm-up on examples with mistakes, and GRPO's gradient on any model."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from examples.grpo import countdown
from examples.grpo.importance import compute_decoupled_objective
from sglang_pat.rollout.records import Group, Sample
from sglang_pat.testing.smollm2 import load_transformers

TOKENS = 4096
"""Most tokens, padding included, that go through the policy at once."""
LOGITS = 1 << 26
"""Most logits at once: 256 MiB, a few times."""
Row = TypeVar("Row")
CAP = 2.0
"""Largest weight of a token of older weights (``partial``)."""


def make_policy() -> Any:
    """A policy of 222,000 parameters."""
    llama = load_transformers()
    config = llama.LlamaConfig(
        vocab_size=countdown.VOCABULARY, hidden_size=96, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=128, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=countdown.EOS, pad_token_id=countdown.PAD,
    )  # fmt: skip
    return llama.LlamaForCausalLM(config)


def warm_up(folder: Path, seed: int, steps: int, slips: float, rows: int = 128, rate: float = 3e-3) -> Path:
    """A policy that knows the form of an answer, and is often wrong, in ``folder``; made if it is not there yet."""
    if folder.exists():
        return folder
    rng = random.Random(f"warm-up {seed}")
    torch.manual_seed(seed)
    policy = make_policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps + 1)
    for _ in range(steps):
        problems = [countdown.draw_problem(rng) for _ in range(rows)]
        examples = [
            (countdown.make_prompt(problem), [*countdown.encode(countdown.solve(problem, rng, slips)), countdown.EOS])
            for problem in problems
        ]
        total = sum(len(answer) for _, answer in examples)
        optimizer.zero_grad()
        for part in split_by_length(examples, lambda example: len(example[0]) + len(example[1])):
            logprobs, mask = compute_logprobs(policy, part)
            (-(logprobs * mask).sum() / total).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=".warm-up.", dir=folder.parent))
    policy.save_pretrained(fresh)
    try:
        fresh.rename(folder)
    except OSError:  # another process was faster
        shutil.rmtree(fresh)
    return folder


def load_policy(folder: Path) -> Any:
    return load_transformers().AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def split_by_length(rows: Sequence[Row], count: Callable[[Row], int], most: int = TOKENS) -> Iterator[list[Row]]:
    """Batches of rows of similar length, ``most`` tokens each: padding is computed, too."""
    part: list[Row] = []
    for row in sorted(rows, key=count):
        if part and (len(part) + 1) * count(row) > most:
            yield part
            part = []
        part.append(row)
    yield part


def compute_logprobs(
    policy: Any, rows: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each token after the first one, and whether it is of the response; ``[rows, tokens - 1]`` each.

    Args:
        rows: token ids of prompt and response.
    """
    tokens = torch.zeros(len(rows), max(len(prompt) + len(response) for prompt, response in rows), dtype=torch.long)
    mask = torch.zeros(tokens.shape[0], tokens.shape[1] - 1)
    for row, (prompt, response) in enumerate(rows):
        tokens[row, : len(prompt) + len(response)] = torch.tensor([*prompt, *response])
        mask[row, len(prompt) - 1 : len(prompt) + len(response) - 1] = 1.0
    # What is padded comes last, where no token of a response sees it.
    logits = policy(input_ids=tokens[:, :-1], use_cache=False).logits
    return torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None]).squeeze(-1), mask


def compute_advantages(rewards: Sequence[float]) -> list[float]:
    """Advantages of a group's responses: how much better than its mean, in standard deviations."""
    values = torch.tensor(rewards)
    return ((values - values.mean()) / (values.std() + 1e-6)).tolist() if len(rewards) > 1 else [0.0 for _ in rewards]


def add_gradient(policy: Any, groups: Sequence[Group], decoupled: bool) -> float:
    """GRPO's gradient, a sum over all tokens; returns how far trainer and engine are apart.

    A sum, so that a batch may come in parts: who has all of them divides by the number of their tokens.

    Args:
        groups: groups with rewards.
        decoupled: whether tokens may be of older weights: each is weighed by what these thought of it.

    Returns:
        Largest difference of a token's probability, between this policy and the engine that sampled it.
    """
    work: list[tuple[list[int], Sample, float]] = []
    for group in groups:
        samples = group.list_rewarded()
        advantages = compute_advantages([cast(float, sample.reward) for sample in samples])
        work += [(group.prompt["input_ids"], *both) for both in zip(samples, advantages, strict=True)]
    apart = 0.0
    most = min(TOKENS, LOGITS // policy.config.vocab_size)
    for part in split_by_length(work, lambda entry: len(entry[0]) + len(entry[1].output.token_ids), most):
        logprobs, mask = compute_logprobs(policy, [(prompt, sample.output.token_ids) for prompt, sample, _ in part])
        proximal = logprobs.detach()
        sampled = proximal.clone()
        for row, (prompt, sample, _) in enumerate(part):
            sampled[row, len(prompt) - 1 :][: len(sample.output.logprobs)] = torch.tensor(sample.output.logprobs)
        apart = max(apart, float(((proximal.exp() - sampled.exp()).abs() * mask).max()))
        advantage = torch.tensor([advantage for *_, advantage in part])[:, None]
        behaviour = sampled if decoupled else proximal
        objective = compute_decoupled_objective(logprobs, proximal, behaviour, advantage, cap=CAP)
        (-(objective * mask).sum()).backward()
    return apart


def copy_weights(policy: Any) -> list[tuple[str, Any]]:
    """Weights for the engine; a matrix that is used twice, once."""
    return [(name, tensor.detach()) for name, tensor in policy.named_parameters()]
