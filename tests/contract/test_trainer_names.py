"""A mixture's weights as trainers have them: transformers' own ``state_dict()``, and what verl makes of it."""

from __future__ import annotations

import pytest
import torch

from sglang_pat.host.fixes.trainer_names import TrainerNames, accept_trainer_names
from sglang_pat.host.fixes.weight_updates import REFUSED, ExpectedWeights
from sglang_pat.layout import ParallelLayout
from sglang_pat.testing import models
from sglang_pat.testing.smollm2 import load_transformers

from .checkpoints import MIXTURES, Checkpoint

pytestmark = pytest.mark.contract

EXPERTS, WIDTH, HIDDEN = 8, 48, 64
LAYOUT = ParallelLayout(2, 1)


@pytest.fixture(scope="module", params=MIXTURES)
def folder(request, tmp_path_factory):
    return models.make_random(request.param, tmp_path_factory.mktemp("names") / "m", layers=2, expert_width=WIDTH)


@pytest.fixture(scope="module")
def checkpoint(folder) -> Checkpoint:
    return Checkpoint(folder)


@pytest.fixture(scope="module")
def state(folder) -> dict[str, torch.Tensor]:
    """The state of the model as OpenRLHF sends it."""
    found = load_transformers().AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert found["model.layers.1.mlp.experts.gate_up_proj"].shape == (EXPERTS, 2 * WIDTH, HIDDEN)
    assert found["model.layers.1.mlp.experts.down_proj"].shape == (EXPERTS, HIDDEN, WIDTH)
    return found


def split_as_verl(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Split experts as ``unfuse_moe_params`` of verl 0.9.1 does for all models, also Mixtral."""
    found = {}
    for name, tensor in state.items():
        mixture, _, part = name.rpartition(".")
        if tensor.dim() == 3:
            parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
            for at, whole in enumerate(tensor):
                names = [f"{mixture}.{at}.{one}.weight" for one in parts]
                found |= zip(names, whole.chunk(len(parts)), strict=True)
        else:
            found[name] = tensor
    return found


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("as_sent", [dict, split_as_verl], ids=["fused", "verl"])
def test_they_are_loaded_as_the_checkpoint_is(checkpoint, state, as_sent, rank):
    sent = as_sent(state)
    assert ExpectedWeights(checkpoint.empty(LAYOUT, rank)).find_problem((n, t.shape) for n, t in sent.items()) is None
    model, wanted = checkpoint.empty(LAYOUT, rank), dict(checkpoint.loaded(LAYOUT, rank).named_parameters())
    for param in model.parameters():
        param.data = torch.zeros(param.shape)
    accept_trainer_names(model)
    model.load_weights(iter(sent.items()))
    for name, param in model.named_parameters():
        assert torch.equal(param, wanted[name]), name


def test_they_become_the_names_of_the_checkpoint_and_nothing_is_copied(checkpoint, state):
    names = TrainerNames(checkpoint.empty(LAYOUT, 0))
    found = dict(names.translate(state.items()))
    assert found.keys() == checkpoint.tensors.keys()
    addresses = {tensor.untyped_storage().data_ptr() for tensor in state.values()}
    for name, tensor in found.items():
        assert torch.equal(tensor, checkpoint.tensors[name]), name
        assert tensor.untyped_storage().data_ptr() in addresses and tensor.is_contiguous(), name
    own = [(name, id(tensor)) for name, tensor in names.translate(checkpoint.tensors.items())]
    assert own == [(name, id(tensor)) for name, tensor in checkpoint.tensors.items()]


@pytest.mark.parametrize(
    ("part", "shape", "said"),
    [
        ("gate_up_proj", (EXPERTS - 1, 2 * WIDTH, HIDDEN), None),  # the last one would stay as it is
        ("down_proj", (EXPERTS + 1, HIDDEN, WIDTH), None),
        ("down_proj", (), None),
        ("gate_up_proj", (EXPERTS, HIDDEN, 2 * WIDTH), [HIDDEN // 2, 2 * WIDTH]),  # as other models have them
        ("gate_up_proj", (EXPERTS, WIDTH, HIDDEN), [WIDTH // 2, HIDDEN]),
        ("gate_up_proj", (EXPERTS, 2 * WIDTH + 1, HIDDEN), [WIDTH + 1, HIDDEN]),
        ("down_proj", (EXPERTS, WIDTH, HIDDEN), [WIDTH, HIDDEN]),
        ("down_proj", (EXPERTS, WIDTH), [WIDTH]),
    ],
)
def test_a_wrong_shape_is_refused_in_one_line(checkpoint, state, part, shape, said):
    expected = ExpectedWeights(checkpoint.empty(LAYOUT, 1))
    name = f"model.layers.1.mlp.experts.{part}"
    given = {name: tuple(tensor.shape) for name, tensor in state.items()} | {name: shape}
    problem = expected.find_problem(given.items())
    assert problem and problem.startswith(REFUSED) and "\n" not in problem
    if said is None:
        assert f"{name} has the shape {list(shape)}, must be of 8 experts" in problem
    else:
        must = [WIDTH, HIDDEN] if part == "gate_up_proj" else [HIDDEN, WIDTH]
        assert ".experts.0." in problem and f" has the shape {said}, must be {must}" in problem
    first = next(iter(given))
    problem = expected.find_problem((given | {first: (3, 3)}).items())
    assert problem and f"{first} has the shape [3, 3]" in problem, "which comes before"


def test_a_mixture_in_a_layer_that_is_not_there_is_refused(checkpoint, state):
    name = "model.layers.1.mlp.experts.down_proj"
    problem = ExpectedWeights(checkpoint.empty(LAYOUT, 0)).find_problem([(name.replace("1", "7"), state[name].shape)])
    assert problem and "the model has no tensor 'model.layers.7.mlp.experts.down_proj'" in problem
