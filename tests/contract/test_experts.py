"""Experts on views are the experts of SGLang's own layer; those that cannot be cut so are refused in one line."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_pat.layout import ParallelLayout
from sglang_pat.testing import models

from .checkpoints import MIXTURES, Checkpoint

pytestmark = pytest.mark.contract

BASE, TAIL = ParallelLayout(1, 2), ParallelLayout(2, 1)


@pytest.fixture(scope="module", params=MIXTURES)
def checkpoint(request, tmp_path_factory) -> Checkpoint:
    return Checkpoint(models.make_random(request.param, tmp_path_factory.mktemp("experts") / "m", layers=1))


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory) -> Checkpoint:
    return Checkpoint(models.make_random("mixtral", tmp_path_factory.mktemp("experts") / "mixtral", layers=1))


def find_experts(model: torch.nn.Module):
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    (found,) = (module for module in model.modules() if isinstance(module, FusedMoE))
    return found


def route(tokens: int, hidden: int = 64, experts: int = 8, chosen: int = 2):
    """Tokens, and which experts a router has chosen for each; none of them the last one."""
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    scores = torch.rand(tokens, experts - 1)
    weights, ids = scores.topk(chosen)
    return torch.randn(tokens, hidden), StandardTopKOutput(weights, ids, scores)


@pytest.mark.parametrize("tokens", [1, 37])
def test_experts_on_views_multiply_as_sglangs(checkpoint, tokens):
    """The ranks' parts are those of SGLang's ranks, and add up to what the base has."""
    from sglang_pat.rank.weights import Views

    x, chosen = route(tokens)
    parts = []
    for rank in range(2):
        base, model, whole = checkpoint.loaded(BASE, rank), checkpoint.empty(TAIL, rank), checkpoint.loaded(TAIL, rank)
        Views(model, base, TAIL, BASE, rank)
        with torch.no_grad():
            ours, theirs, all_of_it = (find_experts(m)(x.clone(), chosen) for m in (model, whole, base))
        torch.testing.assert_close(ours, theirs)
        parts.append(ours)
    torch.testing.assert_close(parts[0] + parts[1], all_of_it, atol=1e-5, rtol=1e-5)


def test_all_numbers_of_tokens_are_compiled(mixtral, monkeypatch):
    """A GPU compiles them.  test_experts_kernel.py tests what the kernel gives."""
    from sglang_pat.host.experts import PiecewiseExperts
    from sglang_pat.rank.weights import Views

    base, model = mixtral.loaded(BASE, 1), mixtral.empty(TAIL, 1)
    Views(model, base, TAIL, BASE, 1)
    layer, seen = find_experts(model), []

    def multiply(method, x, down, weights, ids):
        assert down is layer.w2_weight and weights.shape == ids.shape == (len(x), 2) and set(ids[0].tolist()) == {0, 1}
        seen.append(len(x))

    monkeypatch.setattr(PiecewiseExperts, "multiply_on_gpu", multiply)
    layer.quant_method.compile(layer)
    assert seen[:6] == [1, 2, 2, 3, 4, 5] and seen[-1] == 4097


REFUSED = {
    "moe_ep_size": (2, "experts are spread over the ranks: leave out --ep-size"),
    "num_fused_shared_experts": (1, "shared expert is fused .*: use --disable-shared-experts-fusion"),
    "quant_method": (torch.nn.Identity(), "experts are quantised: use a checkpoint in bfloat16"),
    "quant_method.use_flashinfer_cutlass": (True, "reorders the experts: use --moe-runner-backend triton"),
    "quant_method.with_bias": (True, "experts are not down"),
    "moe_runner_config.activation": ("gelu", "experts are not down"),
    "moe_runner_config.is_gated": (False, "experts are not down"),
    "moe_runner_config.gemm1_alpha": (1.7, "experts are not down"),
    "moe_runner_config.swiglu_limit": (7.0, "experts are not down"),
    "moe_runner_config.routed_scaling_factor": (2.5, "experts are not down"),
    "moe_runner_config.apply_router_weight_on_input": (True, "experts are not down"),
    "moe_runner_config.no_combine": (True, "experts are not down"),
}


@pytest.mark.parametrize("attribute", REFUSED)
def test_experts_that_cannot_be_cut_are_refused(mixtral, attribute):
    from sglang_pat.host.layers import make_shard_specs
    from sglang_pat.rank.shards import ShardError

    value, line = REFUSED[attribute]
    model = mixtral.empty(BASE, 0)
    owner, _, name = attribute.rpartition(".")
    target = find_experts(model)
    setattr(getattr(target, owner) if owner else target, name, value)
    with pytest.raises(
        ShardError, match=rf"--adaptive-tp, model\.layers\.0\..*experts at tp=1: its .*{line}"
    ) as caught:
        make_shard_specs(model)
    assert "\n" not in str(caught.value)


def test_another_runner_is_refused(mixtral):
    from sglang.srt.layers.moe.utils import MoeRunnerBackend

    from sglang_pat.host.experts import find_reason_against

    experts = find_experts(mixtral.empty(BASE, 0))
    assert find_reason_against(experts) is None
    experts.quant_method.runner = SimpleNamespace(runner_backend=MoeRunnerBackend.DEEP_GEMM)
    assert find_reason_against(experts)[1] == "use --moe-runner-backend triton"


@pytest.mark.parametrize("change", ["experts are permuted", "gate and up are swapped", "columns are dealt"])
def test_experts_that_sglang_loads_elsewhere_are_found(mixtral, change):
    from sglang_pat.rank.shard_check import check_shards
    from sglang_pat.rank.shards import ShardError

    model = mixtral.rank.make_model(2, 1)
    check_shards(model, 2, 1)
    experts = find_experts(model)
    load = experts.weight_loader

    def elsewhere(param, loaded, name, shard_id, expert_id):
        if change == "experts are permuted":
            expert_id = 7 - expert_id
        elif change == "gate and up are swapped":
            shard_id = {"w1": "w3", "w3": "w1"}.get(shard_id, shard_id)
        elif shard_id == "w2":
            loaded = torch.cat([loaded[:, ::2], loaded[:, 1::2]], 1)
        load(param, loaded, name, shard_id=shard_id, expert_id=expert_id)

    for param in experts.parameters():
        param.weight_loader = elsewhere
    with pytest.raises(ShardError, match=r"experts\.w(2|13)_weight at tp=2: .* other parts"):
        check_shards(model, 2, 1)
