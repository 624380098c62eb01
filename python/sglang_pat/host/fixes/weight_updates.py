"""Requests with new weights that do not fit are refused before anything of them is written.

SGLang writes tensor after tensor, and finds a wrong one when half of the weights are new; of a name that it does not
know it says so in its log and goes on.  Here a whole request is looked at first, by all ranks: either each of them
takes all of its tensors, or none takes any.  An update may be many requests, and over IPC (checkpoint-engine) a request
many buckets: what will be in the next ones nobody knows, and what earlier ones brought stays.

SGLang 0.5.23 updates in components of its scheduler and of its model runner, and only between ``begin_weight_update``
and ``end_weight_update``, but for files and IPC.

Upstream: ``docs/upstream/update_as_a_whole.md``
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors import safe_open
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

from sglang_pat.errors import format_one_line
from sglang_pat.host import adapter
from sglang_pat.host.assign import Overlaid, assigned
from sglang_pat.host.fixes.shared_memory import open_with_retry
from sglang_pat.host.fixes.trainer_names import Loader, TrainerNames, Weights, accept_trainer_names
from sglang_pat.host.layers import list_checkpoint_parts, make_shard_specs
from sglang_pat.rank.shards import ShardSpec

REFUSED = "weight update refused, no tensor of this request was written; send the whole update again"
NOT_FLUSHED = (
    "all of the weights are new, but the cache was not flushed: requests still have KV in it, of the old weights; "
    "flush it once they have ended, or pause with mode retract before the update"
)
RECAPTURE_REFUSED = "recapture_cuda_graph: not with --adaptive-tp, whose layouts keep their graphs; leave it out"
BROKEN_OFF = "weight update broken off, some of the weights are new: send all of them again"


class ExpectedWeights:
    """The tensors that a model takes in an update: names and shapes as in its checkpoint, or as trainers have them.

    The model's own ``load_weights`` says to which parameter a name leads, and :class:`ShardSpec` how large the whole
    tensor is there.

    Args:
        model: one without memory, for this use alone (:func:`sglang_pat.host.layers.build_model`).
        read: the shapes of all tensors in the checkpoint, asked for when one does not fit the model.
    """

    def __init__(self, model: torch.nn.Module, read: Callable[[], Mapping[str, tuple[int, ...]]] = dict) -> None:
        self._model, self._read, self._names = cast("Loader", model), read, TrainerNames(model)
        config = getattr(model, "config", None)  # SGLang's GPT-J keeps none
        self._tied = bool(getattr(config, "tie_word_embeddings", False))
        self._own = {name: tuple(param.shape) for name, param in model.named_parameters()}
        self._fitting: set[tuple[str, tuple[int, ...]]] = set()
        self._calls: list[tuple[torch.Tensor, tuple[int, ...]]] = []
        specs = make_shard_specs(model)
        for module_name, module in model.named_modules():
            for name, param in module.named_parameters(recurse=False):
                spec = specs[f"{module_name}.{name}" if module_name else name]
                record = self._record_expert_load if isinstance(module, FusedMoE) else self._record_load
                param.weight_loader = partial(record, module, spec)

    def find_problem(self, tensors: Iterable[tuple[str, Sequence[int]]], load_format: str | None = None) -> str | None:
        """Find the first tensor that does not fit; returns what is wrong in one line, or None if all do.

        Args:
            tensors: name and shape of each.
            load_format: the request's; ``direct``: names and shapes of this rank's own parameters.
        """
        if load_format == "direct":
            problems = (self._find_own_mismatch(name, tuple(shape)) for name, shape in tensors)
        else:
            problems = self._find_mismatches((name, torch.empty(shape, device="meta")) for name, shape in tensors)
        problem = next((one for one in problems if one is not None), None)
        return None if problem is None else f"{REFUSED}: {problem}"

    def _find_mismatches(self, tensors: Weights) -> Iterator[str | None]:
        shapes: list[tuple[str, tuple[int, ...]]] = []
        misfit = None
        try:
            for name, tensor in self._names.translate(tensors):
                shapes.append((name, tuple(tensor.shape)))
        except ValueError as error:  # what came before it may not fit either
            misfit = str(error)
        if new := [one for one in shapes if one not in self._fitting]:
            self._note_fitting(new)
        yield from (self._find_mismatch(name, shape) for name, shape in shapes)
        yield misfit

    def _note_fitting(self, tensors: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        """Note which of ``tensors`` fit, as far as one call of the model tells.

        The model walks all of its parameters in each call, and a mixture of experts has 20,000 tensors.  What is not
        noted is looked at by itself.
        """
        offered: dict[int, tuple[str, tuple[int, ...]]] = {}
        kept: list[torch.Tensor] = []  # else the next one may get the same id

        def offer() -> Iterator[tuple[str, torch.Tensor]]:
            for name, shape in tensors:
                kept.append(torch.empty(shape, device="meta"))
                offered[id(kept[-1])] = name, shape
                yield name, kept[-1]

        self._calls.clear()
        try:
            self._model.load_weights(offer())
        except Exception:
            if offered:
                offered.popitem()  # by itself it meets the same exception again
        fits: dict[int, bool] = {}
        for loaded, whole in self._calls:
            fits[id(loaded)] = fits.get(id(loaded), True) and tuple(loaded.shape) == whole
        self._calls.clear()
        if fits.keys() <= offered.keys():  # a model that changes a tensor first does not say which it was
            self._fitting.update(offered[one] for one, fit in fits.items() if fit)

    def _find_mismatch(self, name: str, shape: tuple[int, ...]) -> str | None:
        if (name, shape) in self._fitting:
            return None
        self._calls.clear()
        try:
            self._model.load_weights([(name, torch.empty(shape, device="meta"))])
        except (KeyError, ValueError):
            pass  # how some models say that they have no such parameter, and the Transformers backend
        if not self._calls:
            return None if self._is_ignored(name) else _describe_unknown(name, "the checkpoint's")
        for loaded, whole in self._calls:
            # On a CPU, SGLang makes layers wider than the checkpoint's if kernels want that.
            if tuple(loaded.shape) != whole and self._read().get(name) != shape:
                return _describe_wrong_shape(name, loaded.shape, whole)
        self._fitting.add((name, shape))
        return None

    def _find_own_mismatch(self, name: str, shape: tuple[int, ...]) -> str | None:
        if name not in self._own:
            return _describe_unknown(name, "SGLang's, as load_format direct takes them")
        return None if shape == self._own[name] else _describe_wrong_shape(name, shape, self._own[name])

    def _is_ignored(self, name: str) -> bool:
        """Whether SGLang rightly passes over this name: trainers send all of a checkpoint, and tied heads.

        An expert that it does not know would stay as it is.
        """
        return (self._tied and name.endswith("lm_head.weight")) or (".experts." not in name and name in self._read())

    def _record_load(
        self,
        module: torch.nn.Module,
        spec: ShardSpec,
        param: torch.nn.Parameter,
        loaded: torch.Tensor,
        shard_id: str | int | None = None,
    ) -> None:
        """Record a load, in place of the parameter's ``weight_loader``."""
        whole = list(param.shape)
        if spec.dim is not None:
            parts = list_checkpoint_parts(module, spec)
            whole[spec.dim] = sum(parts.values()) if shard_id is None else parts[shard_id]
        self._calls.append((loaded, tuple(whole)))

    def _record_expert_load(
        self,
        module: torch.nn.Module,
        spec: ShardSpec,
        param: torch.nn.Parameter,
        loaded: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
    ) -> None:
        """Record a load into :class:`FusedMoE`, whose parameters have all experts; a checkpoint's tensors have one."""
        assert spec.dim is not None
        whole = list(param.shape)
        whole[spec.dim] = list_checkpoint_parts(module, spec)[shard_id]
        self._calls.append((loaded, tuple(whole[1:])))


@cache
def read_checkpoint_shapes(folder: str) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors in the safetensors files of a folder; empty where there are no such files."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as file:  # reads the header
            shapes.update((name, tuple(file.get_slice(name).get_shape())) for name in file.keys())
    return shapes


def _describe_unknown(name: str, whose: str) -> str:
    return f"the model has no tensor {name!r}; names must be {whose}"


def _describe_wrong_shape(name: str, shape: Sequence[int], whole: Sequence[int]) -> str:
    return f"{name} has the shape {list(shape)}, must be {list(whole)}"


def list_shapes(tensors: Any, load_format: str | None) -> list[tuple[str, Sequence[int]]] | None:
    """Names and shapes of the tensors that a request brought for this rank; None if only a user's loader knows them.

    Raises:
        ValueError: a bucket that is shorter than what it says is in it.
    """
    if load_format == "flattened_bucket":
        flat, metadata = tensors["flattened_tensor"], tensors["metadata"]
        end = max((one.end_idx for one in metadata), default=0)
        if end > flat.nbytes:
            raise ValueError(f"the bucket holds {flat.nbytes} bytes, its tensors end at {end}")
        return [(one.name, one.shape) for one in metadata]
    if load_format in (None, "direct"):
        return [(name, tensor.shape) for name, tensor in tensors]
    return None


class Receiver(Overlaid):
    """Stand-in for ``model`` while an update is received: what comes is looked at before any of it is loaded.

    All ranks get the same tensors in the same order, so all of them stop before the same ones.

    Attributes:
        problem: what was wrong, in one line.
        loaded: whether anything was loaded.
    """

    def __init__(self, model: torch.nn.Module, expected: ExpectedWeights) -> None:
        super().__init__(model)  # SGLang goes through its modules when all has come
        self._expected = expected
        self.problem: str | None = None
        self.loaded = False

    def load_weights(self, weights: Weights) -> None:
        """Load ``weights`` if all fit, else raise ValueError, on which a sender of buckets over IPC sends no more."""
        tensors = list(weights)
        self.problem = self.problem or self._expected.find_problem((name, tensor.shape) for name, tensor in tensors)
        if self.problem is not None:
            if self.loaded:
                self.problem = self.problem.replace(REFUSED, BROKEN_OFF)
            raise ValueError(self.problem)
        self.loaded = True
        cast("Loader", self._inner).load_weights(tensors)

    def check_lengths(self, names: Sequence[str], shapes: Sequence[Any]) -> None:
        """Take nothing if there are not as many ``shapes`` as ``names``: SGLang takes the first of them."""
        if len(names) != len(shapes):
            self.problem = f"{REFUSED}: {len(names)} names, {len(shapes)} shapes"

    def describe(self, success: bool, message: str) -> str:
        """The answer instead of SGLang's ``message``, where nothing was written."""
        if success or self.loaded:
            return message
        # SGLang takes all failures for one in the middle of loading.
        return self.problem or f"{REFUSED}: {message.partition(' The full weights')[0]}"


class ExpectingTpModelWorker(TpModelWorker):
    """SGLang's ``TpModelWorker``, of which all ranks of the engine take all tensors of a request, or none does.

    The whole class is ``AdaptiveTpModelWorker`` of the adapter's ``runner``.

    Attributes:
        rank: number in the engine; what a request has for this rank stands at this place.
    """

    rank: int

    def expect(self, empty: torch.nn.Module) -> None:
        """Have updates fit ``empty``, a model without memory; trainers' names are theirs or the checkpoint's."""
        accept_trainer_names(self.model_runner.model)
        self.expected = ExpectedWeights(
            empty, partial(read_checkpoint_shapes, self.model_runner.model_config.model_path)
        )

    def open_together(self, recv_req: UpdateWeightsFromTensorReqInput) -> tuple[Any, str | None]:
        """The tensors that a request brought for this rank, and why no rank takes them, in one line; None if all do.

        All ranks call it.  "" on one that could take its own.
        """
        tensors, problem = None, None
        try:
            monkey_patch_torch_reductions()
            open_with_retry()
            tensors = self._open(recv_req)
            if (shapes := list_shapes(tensors, recv_req.load_format)) is not None:
                problem = self.expected.find_problem(shapes, recv_req.load_format)
        except Exception as error:  # the other ranks wait to hear of it
            problem = f"{REFUSED}: {type(error).__name__}: {format_one_line(error)}"
        wrong = torch.tensor([problem is not None], dtype=torch.int32)
        dist.all_reduce(wrong, dist.ReduceOp.MAX, group=self.model_runner.groups.world)
        return tensors, problem or "" if wrong.item() else None

    def _open(self, recv_req: UpdateWeightsFromTensorReqInput) -> Any:
        """The tensors that the request has for this rank."""
        items = recv_req.serialized_named_tensors
        if len(items) <= self.rank:
            raise ValueError(f"{len(items)} items for {dist.get_world_size()} ranks, must be one for each")
        tensors = MultiprocessingSerializer.deserialize(items[self.rank])
        if recv_req.load_format == "flattened_bucket":
            return tensors
        local = adapter.runner.LocalSerializedTensor
        return [(name, tensor.get(self.rank) if isinstance(tensor, local) else tensor) for name, tensor in tensors]

    @contextmanager
    def use_receiver(self) -> Iterator[Receiver]:
        """Put a :class:`Receiver` in place of the model, inside the block."""
        runner = self.model_runner
        received = Receiver(runner.model, self.expected)
        with assigned(runner, model=received):
            yield received
