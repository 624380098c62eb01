"""Layers of a model in host memory, each copied to the GPU while the one before it computes (RollPacker, 4.3).

Streamed layers share :data:`~stream_layers.judge_memory.PLACES` places on the GPU, in turn.  A layer's parameters lie
in its place for good, so a CUDA graph that was captured with them reads what is copied there.

A step is complete in itself: its first copies begin with its first layer and its last copy is awaited by the last
streamed layer.  So a graph of it can be captured, and nothing is left from a step that failed.

Between two steps other layers may be streamed (:meth:`StreamedLayers.stream`); graphs must then be captured anew.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from sglang.srt.utils.offloader import BaseOffloader
from torch import get_device_module
from torch.utils.hooks import RemovableHandle

from sglang_pat.memory.memory_plan import MIB
from stream_layers.judge_memory import FLAG, PLACES, CannotStream

logger = logging.getLogger(__name__)

ALIGNMENT = 256
"""Alignment of parameters in bytes, as the kernels of torch and cuBLAS like it."""


def align(parameter: torch.Tensor) -> int:
    """Bytes of a parameter, rounded up to where the next one may begin."""
    return -(-parameter.nbytes // ALIGNMENT) * ALIGNMENT


def count_bytes(layer: torch.nn.Module) -> int:
    """Bytes of a layer as one run."""
    return sum(map(align, layer.parameters()))


class HostLayer:
    """The parameters of one layer as one run of bytes in host memory.

    Attributes:
        data: the bytes, page-locked where there is a GPU.
    """

    def __init__(self, layer: torch.nn.Module) -> None:
        self._parameters = list(layer.parameters())
        self._offsets = list(accumulate(map(align, self._parameters), initial=0))[:-1]
        self.data = torch.empty(count_bytes(layer), dtype=torch.uint8, device="cpu")
        if self._parameters[0].device.type == "cuda":
            runtime = torch.cuda.cudart()
            # torch's own page-locked memory is rounded up to a power of two.
            torch.cuda.check_error(runtime.cudaHostRegister(self.data.data_ptr(), self.data.nbytes, 0))
            weakref.finalize(self, runtime.cudaHostUnregister, self.data.data_ptr()).atexit = False
        for parameter, view in zip(self._parameters, self._view(self.data), strict=True):
            view.copy_(parameter.data)
        self.place_in(self.data)

    def place_in(self, place: torch.Tensor) -> None:
        """Have the layer's parameters lie in ``place`` (uint8, at least as long as :attr:`data`) from now on."""
        for parameter, view in zip(self._parameters, self._view(place), strict=True):
            parameter.data = view

    def is_in_host_memory(self) -> bool:
        """Whether the parameters still are those bytes: a loader may have put others in their place."""
        views = self._view(self.data)
        return all(p.data_ptr() == view.data_ptr() for p, view in zip(self._parameters, views, strict=True))

    def _view(self, data: torch.Tensor) -> list[torch.Tensor]:
        return [
            data[offset : offset + parameter.nbytes]
            .view(parameter.dtype)
            .as_strided(parameter.size(), parameter.stride())
            for parameter, offset in zip(self._parameters, self._offsets, strict=True)
        ]


class StreamedLayers(BaseOffloader):
    """SGLang's offloader of a model: it makes the layers, and moves those that are streamed to host memory at once.

    Args:
        order: numbers of all layers, in the order in which they go to host memory.
        start: number of layers that are streamed at first.
        device: device of the model, ``cuda`` or ``cpu``; on a CPU a copy is made in the moment that it is asked for.

    Attributes:
        copy_seconds: seconds to copy a layer; 0 while all are resident.
    """

    def __init__(self, order: Sequence[int], start: int, device: str) -> None:
        self.start = start
        self.copy_seconds = 0.0
        self._order = order
        self._device = device
        self._modules: list[torch.nn.Module] = []
        self._host: dict[int, HostLayer] = {}
        self._layers: list[HostLayer] = []
        self._places: list[torch.Tensor] = []
        self._hooks: list[RemovableHandle] = []
        self._backend: Any = get_device_module(device)
        self._stream = self._backend.Stream()
        self._arrived = [self._backend.Event() for _ in range(PLACES)]
        self._computed = [self._backend.Event() for _ in range(PLACES)]

    @property
    def count(self) -> int:
        """Number of layers that are streamed now."""
        return len(self._host)

    @property
    def total(self) -> int:
        return len(self._order)

    @property
    def can_change(self) -> bool:
        """Whether the model has one list of layers, all of which were found."""
        return len(self._modules) == self.total

    @property
    def layer_bytes(self) -> int:
        """Bytes of the largest layer, and so of each place."""
        return max(map(count_bytes, self._modules))

    @property
    def resident_bytes(self) -> int:
        """Bytes of the layers on the device: the resident ones, and the places of the others."""
        resident = (module for number, module in enumerate(self._modules) if number not in self._host)
        return sum(p.nbytes for module in resident for p in module.parameters()) + sum(p.nbytes for p in self._places)

    @property
    def host_bytes(self) -> int:
        return sum(layer.data.nbytes for layer in self._layers)

    def wrap_modules(self, all_modules_generator: Iterable[torch.nn.Module], *_: Any, **__: Any) -> list[Any]:
        """Make the layers; SGLang's ``make_layers`` calls this with a generator that makes one after the other."""
        if self._modules and self.start:
            raise CannotStream(f"{FLAG}: this model has layers of two kinds; choose a text model")
        modules: list[torch.nn.Module] = []
        for number, layer in enumerate(all_modules_generator):
            modules.append(layer)
            if number in self._order[: self.start]:
                self._host[number] = HostLayer(layer)
        self._modules += modules
        return modules

    def find_layers(self, model: torch.nn.Module) -> None:
        """Move layers that SGLang has made without ``make_layers``, of a model whose weights are not loaded yet."""
        lists = (module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
        if not self._modules and len(stacks := [stack for stack in lists if len(stack) == self.total]) == 1:
            self.wrap_modules(stacks[0])

    def post_init(self) -> None:
        """Give the layers their places.  SGLang calls this with the weights loaded, before it counts memory for KV."""
        if not self.can_change:
            if not self.start:
                return
            raise CannotStream(f"{FLAG}: this model has no list of {self.total} layers; choose another model")
        if not all(layer.is_in_host_memory() for layer in self._host.values()):
            raise CannotStream(f"{FLAG}: the loader moved the model's weights; choose another --load-format")
        self._arrange()
        logger.info("%s", self)

    def __str__(self) -> str:
        return (
            f"{self.count} of {self.total} layers are streamed from {self.host_bytes / MIB:.2f} MiB of host memory; "
            f"{self.resident_bytes / MIB:.2f} MiB of layers are on the device"
        )

    def stream(self, count: int) -> None:
        """Have ``count`` layers streamed from now on; no step may run meanwhile, and graphs are to be captured anew.

        To take layers, the device must have room for all of them.  Else nothing changes.
        """
        self._backend.synchronize()
        taken = [self._host[number] for number in self._order[count : self.count]]
        try:
            own = [torch.empty(layer.data.nbytes, dtype=torch.uint8, device=self._device) for layer in taken]
        except torch.OutOfMemoryError:
            return
        for layer, data in zip(taken, own, strict=True):
            data.copy_(layer.data)
            layer.place_in(data)
        for number in self._order[count : self.count]:
            del self._host[number]
        for number in self._order[self.count : count]:
            self._host[number] = HostLayer(self._modules[number])
        self._arrange()
        if self._device == "cuda":
            torch.cuda.empty_cache()  # what the judge gave up is for others

    @contextmanager
    def in_host_memory(self) -> Iterator[None]:
        """Have parameters be the bytes in host memory meanwhile, to be written or read."""
        if all(layer.is_in_host_memory() for layer in self._layers):  # by one around this one, or none is streamed
            yield
            return
        self._backend.synchronize()  # copies of a step may be under way
        for layer in self._layers:
            layer.place_in(layer.data)
        try:
            yield
        finally:
            self._place_all()

    def _arrange(self) -> None:
        """Give the layers in host memory their places, and the hooks that order the copies."""
        self._layers = [layer for _, layer in sorted(self._host.items())]
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if not self._layers:
            self._places, self.copy_seconds = [], 0.0
            return
        if not self._places:
            size = self.layer_bytes
            self._places = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(PLACES)]
        # Before the hook that waits, if the first layer is streamed itself.
        self._hooks.append(self._modules[0].register_forward_pre_hook(self._begin_step))
        for index, number in enumerate(sorted(self._host)):
            module = self._modules[number]
            self._hooks.append(module.register_forward_pre_hook(partial(self._await_copy, index)))
            self._hooks.append(module.register_forward_hook(partial(self._free_place, index)))
        self._place_all()
        self._backend.synchronize()
        begin = time.perf_counter()
        self._places[0][: self._layers[0].data.nbytes].copy_(self._layers[0].data)
        self._backend.synchronize()
        self.copy_seconds = time.perf_counter() - begin

    def _place_all(self) -> None:
        for index, layer in enumerate(self._layers):
            layer.place_in(self._places[index % PLACES])

    def _begin_step(self, *_: Any) -> None:
        # Steps before this one may still compute in the places; and a capture follows from stream to stream.
        self._stream.wait_stream(self._backend.current_stream())
        for index in range(PLACES):
            self._start_copy(index)

    def _start_copy(self, index: int) -> None:
        data = self._layers[index].data
        with self._backend.stream(self._stream):
            self._places[index % PLACES][: data.nbytes].copy_(data, non_blocking=True)
        self._arrived[index % PLACES].record(self._stream)

    def _await_copy(self, index: int, *_: Any) -> None:
        self._backend.current_stream().wait_event(self._arrived[index % PLACES])

    def _free_place(self, index: int, *_: Any) -> None:
        """The layer is computed: the next one that shares its place may be copied there."""
        if (following := index + PLACES) < len(self._layers):
            computed = self._computed[index % PLACES]
            computed.record(self._backend.current_stream())
            self._stream.wait_event(computed)
            self._start_copy(following)
