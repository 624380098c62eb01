"""Weights of every layout (:class:`Views`): the base shards stay, and all other layouts are views of them.

The model object of a layout is built by SGLang's own constructor under that layout's groups, without memory
for its parameters (``host/layers.py``).  A parameter that is one interval of the base shard, in rows or in columns,
becomes a view of it.  One that is several (q, k and v; gate and up, also of experts) is multiplied piece by piece.  So
a weight update is in force in every layout at once, and there is nothing to fill, to release or to invalidate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from sglang_pat.host.experts import PiecewiseExperts
from sglang_pat.host.layers import PiecewiseLinear, divide_layer, is_packed, make_shard_specs
from sglang_pat.layout import ParallelLayout
from sglang_pat.rank.shards import Copy, ShardError, list_copies


@dataclass
class _Source:
    """Place of a layout's parameter in the base layout's: pieces along ``dim``, or all of it (``dim`` None)."""

    module: torch.nn.Module
    name: str
    dim: int | None
    pieces: list[Copy]

    @property
    def tensor(self) -> torch.Tensor:
        return getattr(self.module, self.name).data

    def make_views(self) -> list[torch.Tensor]:
        if self.dim is None:
            return [self.tensor]
        return [self.tensor.narrow(self.dim, piece.src, piece.length) for piece in self.pieces]


class Views:
    """One layout's parameters, as views of the base model's.

    Life cycle: placed once, and again (:meth:`refresh`) before a switch to the layout if base weights have moved.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        base_model: torch.nn.Module,
        layout: ParallelLayout,
        base: ParallelLayout,
        rank: int,
    ) -> None:
        """Place ``model``'s parameters.

        Raises:
            ShardError: a parameter of this layout does not lie inside the base shard, or SGLang has packed it.
        """
        self._whole: list[tuple[torch.nn.Parameter, _Source]] = []
        self._split: list[tuple[PiecewiseLinear | PiecewiseExperts, _Source, _Source | None]] = []
        specs, base_specs = make_shard_specs(model), make_shard_specs(base_model)
        base_modules = dict(base_model.named_modules())
        for module_name, module in model.named_modules():
            base_module, sources = base_modules[module_name], {}
            if is_packed(base_module):
                raise ShardError(module_name, base.tp, "SGLang has packed it for AMX", "use --dtype float32")
            for name, param in module.named_parameters(recurse=False):
                full_name = f"{module_name}.{name}" if module_name else name
                dim = specs[full_name].dim
                held = base_specs[full_name].list_intervals(base.tp, base.tp_rank(rank))
                intervals = specs[full_name].list_intervals(layout.tp, layout.tp_rank(rank))
                source = sources[name] = _Source(base_module, name, dim, list_copies(held, intervals))
                shape = list(source.tensor.shape)
                if dim is not None:
                    shape[dim] = sum(piece.length for piece in source.pieces)
                if list(param.shape) != shape:
                    advice = f"leave tp={layout.tp} out of --pat-candidates or use --pat-weights reshard"
                    why = "its shard does not lie inside the base shard (vocabulary padding?)"
                    raise ShardError(full_name, layout.tp, why, advice)
            if any(len(source.pieces) > 1 for source in sources.values()):
                self._divide(module, module_name, layout.tp, sources)
            else:
                self._whole += [(getattr(module, name), source) for name, source in sources.items()]
        self.refresh()

    def _divide(self, module: torch.nn.Module, name: str, tp: int, sources: dict[str, _Source]) -> None:
        method, (weight, *bias), whole = divide_layer(module, name, tp, set(sources))
        self._split.append((method, sources[weight], sources[bias[0]] if bias else None))
        self._whole += [(getattr(module, parameter), sources[parameter]) for parameter in whole]

    def _find_sources(self) -> Iterator[_Source]:
        yield from (source for _, source in self._whole)
        yield from (source for _, *both in self._split for source in both if source is not None)

    def _list_addresses(self) -> list[int]:
        return [source.tensor.data_ptr() for source in self._find_sources()]

    def have_moved(self) -> bool:
        """Whether base parameters lie elsewhere than when the views were placed.

        An update that writes into them, as SGLang's do, moves none; one that replaces a tensor does.
        """
        return self._list_addresses() != self._placed

    def refresh(self) -> None:
        """Point the views at the base parameters where they lie now."""
        for param, source in self._whole:
            (param.data,) = source.make_views()
        for method, weight, bias in self._split:
            method.set_pieces(weight.make_views(), bias.make_views() if bias else None)
        self._placed = self._list_addresses()


# -- ``--pat-weights reshard``: one copy, moved at the switch, as PAT does (to compare with) ---------------------------


def reshard(
    old_model: torch.nn.Module,
    new_model: torch.nn.Module,
    old: ParallelLayout,
    new: ParallelLayout,
    rank: int,
    group: dist.ProcessGroup,
) -> None:
    """Move the weights to another layout the way PAT does (section 4.3): all-gather, then slice.

    Parameter by parameter inside the old TP group ``group``, so that the extra memory is one full
    parameter; the old shard is given up as soon as the new one stands.  All ranks call it together.
    """
    specs = make_shard_specs(new_model)
    old_specs = make_shard_specs(old_model)
    old_params = dict(old_model.named_parameters())
    with torch.no_grad():
        for name, param in new_model.named_parameters():
            source, spec = old_params[name], specs[name]
            if spec.dim is None:
                param.data = source.data
                continue
            shards = [source.data]
            if old.tp > 1:
                shards = [torch.empty_like(source.data) for _ in range(old.tp)]
                dist.all_gather(shards, source.data.contiguous(), group=group)
            shape = list(source.shape)
            intervals = spec.list_intervals(new.tp, new.tp_rank(rank))
            shape[spec.dim] = sum(length for _, length in intervals)
            target = source.data.new_zeros(shape)
            for tp_rank, shard in enumerate(shards):
                for piece in list_copies(old_specs[name].list_intervals(old.tp, tp_rank), intervals):
                    target.narrow(spec.dim, piece.dst, piece.length).copy_(
                        shard.narrow(spec.dim, piece.src, piece.length)
                    )
            param.data = target
            source.data = source.data.new_empty(0)
