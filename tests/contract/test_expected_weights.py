"""The tensors of an update are looked at in one call of the model, and experts one by one."""

from __future__ import annotations

import pytest
import torch

from sglang_pat.host.fixes.weight_updates import ExpectedWeights
from sglang_pat.layout import ParallelLayout
from sglang_pat.testing import models

from .checkpoints import MIXTURES, Checkpoint

pytestmark = pytest.mark.contract


@pytest.fixture(scope="module", params=MIXTURES)
def checkpoint(request, tmp_path_factory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("expected") / "m"
    return Checkpoint(models.make_random(request.param, folder, layers=2, expert_width=48))


def list_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in checkpoint.tensors.items()}


class Counted:
    """What a model is asked for: the number of tensors in each call."""

    def __init__(self, expected: ExpectedWeights) -> None:
        self._model, self.calls = expected._model, []
        expected._model = self

    def load_weights(self, weights) -> None:
        weights = list(weights)
        self.calls.append(len(weights))
        self._model.load_weights(weights)


def test_one_call_for_all(checkpoint):
    """A call takes 2 ms in a large mixture, which has 20,000 tensors."""
    expected, shapes = ExpectedWeights(checkpoint.empty(ParallelLayout(2, 1), 1)), list_shapes(checkpoint)
    counted = Counted(expected)
    assert expected.find_problem(shapes.items()) is None
    assert counted.calls == [len(shapes)]
    assert expected.find_problem(shapes.items()) is None, "and none for what is known"
    assert counted.calls == [len(shapes)]


@pytest.mark.parametrize("at", [0, 20, -1])
def test_the_first_tensor_that_does_not_fit_is_named(checkpoint, at):
    given = list(list_shapes(checkpoint).items())
    name, shape = given[at]
    expected = ExpectedWeights(checkpoint.empty(ParallelLayout(2, 1), 0))
    for wrong, why in (
        ((name, (*shape[:-1], shape[-1] + 1)), f"{name} has the shape"),
        ((f"{name}_", shape), f"the model has no tensor {name + '_'!r}"),
    ):
        given[at] = wrong
        problem = expected.find_problem(given)
        assert problem and why in problem and "\n" not in problem


def test_an_expert_is_taken_by_its_own_name(checkpoint):
    """SGLang would pass over another one, even if it is the checkpoint's."""
    name = next(name for name in checkpoint.tensors if "experts.7." in name)
    other = name.replace("experts.7.", "experts.99.")
    shape = tuple(checkpoint.tensors[name].shape)
    expected = ExpectedWeights(checkpoint.empty(ParallelLayout(2, 1), 0), lambda: {other: shape})
    assert expected.find_problem([(name, shape)]) is None
    problem = expected.find_problem([(name, shape[::-1])])
    assert problem and f"{name} has the shape {list(shape[::-1])}, must be {list(shape)}" in problem
    problem = expected.find_problem([(other, shape)])
    assert problem and f"the model has no tensor {other!r}; names must be the checkpoint's" in problem


def test_a_layer_may_be_wider_than_the_checkpoint():
    """SGLang makes some layers wider on a CPU, and fills them up."""
    expected = ExpectedWeights(Changing(), lambda: {"linear.weight": (3, 4)})
    for rows, fits in ((4, True), (5, True), (6, False)):
        assert (expected.find_problem([("linear.weight", (3, rows))]) is None) == fits


class Changing(torch.nn.Module):
    """A model that turns tensors around before it loads them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 5, bias=False)

    def load_weights(self, weights) -> None:
        for name, loaded in weights:
            if name == "linear.weight":
                self.linear.weight.weight_loader(self.linear.weight, loaded.t())


def test_a_model_may_change_a_tensor_first():
    """One call does not say then which tensor it was: each is looked at by itself."""
    expected = ExpectedWeights(Changing())
    assert expected.find_problem([("linear.weight", (3, 5))]) is None
    assert "has the shape" in (expected.find_problem([("linear.weight", (3, 6))]) or "")
    assert "no tensor 'other'" in (expected.find_problem([("linear.weight", (3, 5)), ("other", (3, 5))]) or "")
