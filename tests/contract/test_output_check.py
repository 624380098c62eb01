"""What the check of outputs is made of; that it refuses is shown by ``test_start_refused.py``."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_pat.config import AdaptiveConfig
from sglang_pat.layout import ParallelLayout

pytestmark = pytest.mark.contract


def test_distances():
    from sglang_pat.rank.output_check import measure_distances

    expected = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    other = torch.randn(3, 1000, generator=torch.Generator().manual_seed(1))
    assert measure_distances(expected, expected.clone()).tolist() == [0, 0, 0]
    assert measure_distances(other, expected) == pytest.approx([2**0.5] * 3, abs=0.1)
    near = measure_distances(expected + 0.01 * other, expected)
    assert near == pytest.approx([0.01] * 3, rel=0.1)
    assert measure_distances(1e-6 * (expected + 0.01 * other), 1e-6 * expected) == pytest.approx(near.tolist())
    same = torch.zeros(1, 8)
    assert measure_distances(same, same).tolist() == [0]
    assert measure_distances(same + 1e-3 * torch.arange(8), same).item() == float("inf")


def test_what_is_no_number_is_equal_to_itself_only():
    from sglang_pat.rank.output_check import measure_distances

    broken = torch.tensor([[1.0, float("nan"), 2.0]])
    assert measure_distances(broken, broken).tolist() == [0]
    assert measure_distances(broken, torch.tensor([[1.0, 1.5, 2.0]])).item() == float("inf")


class World:
    """A scheduler whose layouts answer with these logits."""

    def __init__(self, monkeypatch, dtype: torch.dtype, model: torch.nn.Module, wrong: dict[int, torch.Tensor]) -> None:
        from sglang_pat.rank import output_check

        self.adaptive = AdaptiveConfig(base=ParallelLayout(1, 4))
        self.server_args = SimpleNamespace(load_format="auto")
        self.rank, self.moved = 0, []
        self.layouts = SimpleNamespace(
            base=SimpleNamespace(model=model),
            dtype=dtype,
            resharding=True,
            reshard=lambda old, new: self.moved.append((old.tp, new.tp)),
        )
        right = torch.randn(16, 500, generator=torch.Generator().manual_seed(0))
        far = torch.randn(16, 500, generator=torch.Generator().manual_seed(1))
        logits = {tp: right + wrong.get(tp, torch.zeros(16, 1)) * far for tp in (1, 4)}
        monkeypatch.setattr(output_check, "_compute_logits", lambda _, layout: [right, logits[layout.tp]])


def make_mixture() -> torch.nn.Module:
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    model = torch.nn.Module()
    model.experts = FusedMoE.__new__(FusedMoE)
    torch.nn.Module.__init__(model.experts)
    return model


DENSE = torch.nn.Module
SOME = torch.tensor([[0.05]] * 4 + [[1.0]] * 12)
"""Tokens of a mixture that were given another expert."""


@pytest.mark.parametrize("dtype, make, off, refused", [
    (torch.float32, DENSE, torch.full((16, 1), 1e-6), False),
    (torch.float32, DENSE, torch.full((16, 1), 0.1), True),
    (torch.float32, make_mixture, SOME, True),
    (torch.bfloat16, DENSE, torch.full((16, 1), 0.08), False),
    (torch.bfloat16, DENSE, SOME, True),
    (torch.bfloat16, make_mixture, SOME, False),
    (torch.bfloat16, make_mixture, torch.full((16, 1), 0.4), True),
])  # fmt: skip
def test_what_is_refused(monkeypatch, dtype, make, off, refused):
    from sglang_pat.errors import Unsupported
    from sglang_pat.rank.output_check import check_outputs

    world = World(monkeypatch, dtype, make(), {4: off})
    if not refused:
        check_outputs(world)
        assert world.moved == [(1, 4), (4, 1)], "the weights are back"
        return
    with pytest.raises(Unsupported, match=r"its logits at tp=4 are not those at tp=1 \(decode: off by \d+%") as caught:
        check_outputs(world)
    assert "\n" not in str(caught.value)


def test_a_forward_pass_that_fails_is_refused_in_one_line(monkeypatch):
    from sglang_pat.errors import Unsupported
    from sglang_pat.rank import output_check

    done = []

    def enter_layout(layout, epoch):
        raise IndexError("of a layer\nthat is not there")

    monkeypatch.setattr(output_check.kv, "clear_pools", lambda scheduler: done.append("cleared"))
    scheduler = SimpleNamespace(enter_layout=enter_layout)
    with pytest.raises(Unsupported, match="forward pass at tp=2 fails with IndexError: of a layer that is not there"):
        output_check._compute_logits(scheduler, ParallelLayout(2, 1))
    assert done == ["cleared"]


@pytest.mark.parametrize("room, most, lengths", [
    (10_000, 100, list(range(4, 20))), (10_000, 2, [4, 5]), (11, 100, [4, 5]), (10, 100, [4]), (3, 100, [2]),
])  # fmt: skip
def test_prompts_fit_into_little_room(room, most, lengths):
    from sglang_pat.rank.output_check import choose_lengths

    assert choose_lengths(room, most) == lengths


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dummy_weights_are_the_same_afterwards(dtype):
    from sglang_pat.rank.output_check import _enlarge

    model = torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 4)).to(dtype)
    drawn = torch.Generator().manual_seed(0)  # of eight values the spread is often far off
    for param in model.parameters():
        param.data.uniform_(-1e-3, 1e-3, generator=drawn)
    before = [param.data.clone() for param in model.parameters()]
    with pytest.raises(ZeroDivisionError), _enlarge(model):
        assert 0.05 < model[0].weight.std() < 0.2 and 0.5 < model[1].weight.std() < 3
        raise ZeroDivisionError
    assert all(torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True))


def test_placeholders_keep_their_first_value():
    """SGLang's Transformers backend knows by it what kind of norm it has.

    What torch's own layers set is kept, too.
    """
    from sglang_pat.host.layers import _skip_allocation

    class Norm(torch.nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((4, 6), value))

    torch.empty(64).fill_(3.0)  # what fresh memory may hold
    with _skip_allocation():
        made = [Norm(0.0).weight, Norm(1.0).weight, torch.nn.LayerNorm(4).weight, torch.nn.LayerNorm(4).bias]
        torch.nn.init.constant_(constant := torch.nn.Linear(3, 5).weight, 2.0)
        made += [constant, torch.nn.Embedding(7, 3).weight]
    assert [param.shape for param in made] == [(4, 6), (4, 6), (4,), (4,), (5, 3), (7, 3)]
    assert all(param.untyped_storage().nbytes() == 4 for param in made)
    assert [param.unique().tolist() for param in made[:5]] == [[0.0], [1.0], [1.0], [0.0], [2.0]]


@pytest.mark.parametrize("kind", ["smollm3", "helium"])
def test_norms_of_the_transformers_backend(tmp_path, kind):
    """This backend's norms multiply by their weight.

    SGLang often took them for those that multiply by 1 more.
    """
    from sglang.srt.layers.layernorm import GemmaRMSNorm, RMSNorm

    from sglang_pat.testing import models

    from .checkpoints import Checkpoint

    checkpoint = Checkpoint(models.make_random(kind, tmp_path / kind, layers=4, kv_heads=8))
    for _ in range(5):
        model = checkpoint.empty(ParallelLayout(2, 1), 0)
        norms = [module for module in model.modules() if isinstance(module, (RMSNorm, GemmaRMSNorm))]
        assert len(norms) == 9 and not any(isinstance(norm, GemmaRMSNorm) for norm in norms)
