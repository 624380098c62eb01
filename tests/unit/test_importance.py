"""Importance weights of responses that older weights have begun."""

from __future__ import annotations

import pytest
import torch

from examples.grpo.importance import compute_decoupled_objective, compute_decoupled_weights

pytestmark = pytest.mark.unit


def test_without_staleness_it_is_ppo():
    torch.manual_seed(0)
    train, proximal = torch.randn(3, 5), torch.randn(3, 5)
    advantage = torch.randn(3, 1)
    ratio = (train - proximal).exp()
    ppo = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    torch.testing.assert_close(compute_decoupled_objective(train, proximal, proximal, advantage), ppo)


def test_the_recipes_formula():
    """min(train/behaviour · A, prox/behaviour · clip(train/prox) · A), written out for one token at a time."""
    torch.manual_seed(1)
    train, proximal, behaviour, advantage = torch.randn(4, 200).unbind()
    found = compute_decoupled_objective(train, proximal, behaviour, advantage, clip=0.2)
    for t, p, b, a, value in zip(train, proximal, behaviour, advantage, found, strict=True):
        t, p, b = t.exp(), p.exp(), b.exp()
        clipped = max(0.8, min(1.2, float(t / p)))
        assert float(value) == pytest.approx(min(float(t / b * a), float(p / b) * clipped * float(a)), rel=1e-4)


def test_only_the_trained_policy_has_a_gradient():
    train, proximal, behaviour = (torch.randn(6, requires_grad=True) for _ in range(3))
    compute_decoupled_objective(train, proximal, behaviour, torch.ones(6), clip=100.0).sum().backward()
    assert train.grad is not None
    assert proximal.grad is None
    assert behaviour.grad is None


def test_weights_are_capped_and_shapes_checked():
    ratio, weight = compute_decoupled_weights(torch.zeros(2), torch.tensor([3.0, 0.0]), torch.zeros(2), cap=2.0)
    assert weight.tolist() == [2.0, 1.0]
    with pytest.raises(ValueError, match="must be the same"):
        compute_decoupled_weights(torch.zeros(2), torch.zeros(3), torch.zeros(2))
