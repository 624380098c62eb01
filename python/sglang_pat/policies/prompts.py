"""Long prompts: which replica computes one (:func:`compute_allowed_lead`), and what it is worth to find it there."""

from __future__ import annotations

import numpy as np

LONG_PROMPT = 4096
"""Tokens below which a shared prompt does not matter: siblings that come together are all computed
(:data:`AT_ONCE`)."""

AT_ONCE = 16384
"""Tokens up to which siblings that come to a replica together are all computed.  SGLang looks for a prompt in the radix
tree when it puts a prefill step together, of 8,192 tokens by default, and with overlap scheduling the step before is
not in the tree yet.  (Of its scheduling policies only ``lpm``, not the default, lets siblings wait for the first.)"""

READ_PER_COMPUTED = 4000
"""Tokens of KV that are read while decoding, worth one token that is computed in a prefill.  A model of 8 billion
parameters reads 800 to 1,000 in the time (modelled, H100 and A40).  A replica that is fuller than others is so for a
part of the time only: four times as much did best in simulations."""


def compute_allowed_lead(prompt: np.ndarray | int, response: float) -> np.ndarray:
    """Number of requests that the replica with a prompt may have more than the emptiest one, as int64 ``[...]``.

    One more there lengthens the steps of the others by reading its KV, as often as its response has tokens.  0: the
    least load decides.

    Args:
        prompt: tokens, ``[...]``.
        response: tokens of a response, as expected.
    """
    prompt, response = np.asarray(prompt, dtype=float), max(response, 1.0)
    requests = READ_PER_COMPUTED * prompt / (response * (prompt + response / 2))
    # One more only makes pairs, and both of a pair are computed.
    return np.where((prompt >= LONG_PROMPT) & (requests >= 2), requests, 0).astype(np.int64)


def count_shared_tokens(prompt: np.ndarray, family: np.ndarray) -> float:
    """KV tokens that a request shares with its siblings, on average: of long prompts, which one replica has.

    Args:
        prompt, family: see :func:`count_prompts_to_compute`.
    """
    _, index, siblings = np.unique(family, return_inverse=True, return_counts=True)
    return float(np.where(prompt >= LONG_PROMPT, prompt * (1 - 1 / siblings[index]), 0.0).mean())


def count_prompts_to_compute(
    prompt: np.ndarray, family: np.ndarray, response: float, replicas: int
) -> tuple[int, float]:
    """What one replica has to compute if these requests come in now: prompts, and their root-mean-square length.

    Args:
        prompt: tokens of each; ``family``: equal for siblings; int64 ``[requests]``.
        response: see :func:`compute_allowed_lead`.
    """
    _, first, siblings = np.unique(family, return_index=True, return_counts=True)
    length = np.maximum(prompt[first], 1)
    together = siblings  # on one replica
    if replicas > 1:
        more = compute_allowed_lead(length, response)
        together = np.where(more > 0, np.minimum(siblings, 1 + more), -(-siblings // replicas))
    copies = siblings / together * np.minimum(together, np.maximum(AT_ONCE // length, 1))
    number = float(copies.sum())
    return int(np.ceil(number / replicas)), float(np.sqrt((copies * length.astype(float) ** 2).sum() / number))
