"""Importance weights for responses that several weight versions generated (AReaL's decoupled objective; verl's recipe).

Three policies: *behaviour*, what generated each token (its log-prob is kept with it, under whatever weights it was);
*proximal*, the policy that the trust region is around, the weights at the start of this training step; *train*, the one
that is being updated.
"""

from __future__ import annotations

import torch


def compute_decoupled_weights(
    train: torch.Tensor, proximal: torch.Tensor, behaviour: torch.Tensor, cap: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ratio, weight), ``[..., tokens]`` each: π_train/π_prox, to be clipped, and π_prox/π_behaviour, a constant.

    Args:
        train, proximal, behaviour: log-probs of the tokens that were sampled, ``[..., tokens]``.
        cap: most that the weight may be (truncated importance sampling); None: no bound.

    Raises:
        ValueError: shapes that differ.
    """
    if not train.shape == proximal.shape == behaviour.shape:
        shapes = [tuple(t.shape) for t in (train, proximal, behaviour)]
        raise ValueError(f"log-probs of shapes {shapes[0]}, {shapes[1]} and {shapes[2]}: must be the same")
    weight = (proximal - behaviour).detach().exp()
    return (train - proximal.detach()).exp(), weight if cap is None else weight.clamp(max=cap)


def compute_decoupled_objective(
    train: torch.Tensor, proximal: torch.Tensor, behaviour: torch.Tensor, advantage: torch.Tensor,
    clip: float = 0.2, cap: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """min(ρ·A, clip(ρ, 1 - clip, 1 + clip)·A) weighted by π_prox/π_behaviour, ``[..., tokens]``; to be maximized.

    Without staleness (behaviour = proximal) it is PPO's.  ``advantage``: ``[..., tokens]`` or broadcast to it.
    """
    ratio, weight = compute_decoupled_weights(train, proximal, behaviour, cap)
    return weight * torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
