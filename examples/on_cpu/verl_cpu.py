"""A platform for verl without accelerators, by verl's own registry.

``VERL_USE_EXTERNAL_MODULES=on_cpu.verl_cpu VERL_PLATFORM=cpu``; Ray is told that the machine has N "GPU"s
(``ray.init(num_gpus=N)``), so that verl's placement and its bookkeeping of visible devices run as they are.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

GIB = 1 << 30


def _nothing(*args, **kwargs) -> None:
    pass


def _zero(*args, **kwargs) -> int:
    return 0


_MISSING = {
    "empty_cache": _nothing,
    "ipc_collect": _nothing,
    "reset_peak_memory_stats": _nothing,
    "set_per_process_memory_fraction": _nothing,
    "memory_allocated": _zero,
    "memory_reserved": _zero,
    "max_memory_allocated": _zero,
    "max_memory_reserved": _zero,
    "mem_get_info": lambda *args: (8 * GIB, 16 * GIB),
    "get_device_name": lambda *args: "CPU",
    "get_rng_state": torch.get_rng_state,
    "set_rng_state": torch.set_rng_state,
    "manual_seed": torch.manual_seed,
    "manual_seed_all": torch.manual_seed,
}
"""Functions that verl and FSDP ask of a device module, and that ``torch.cpu`` does not have."""

for _name, _function in _MISSING.items():
    if not hasattr(torch.cpu, _name):
        setattr(torch.cpu, _name, _function)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    device_name = property(lambda self: "cpu")
    vendor_name = property(lambda self: "cpu")
    device_module = property(lambda self: torch.cpu)
    is_available = lambda self: True  # noqa: E731
    device_count = lambda self: 1  # noqa: E731
    is_ipc_supported = lambda self: False  # noqa: E731
    set_device = synchronize = set_allocator_settings = empty_cache = profiler_start = profiler_stop = _nothing
    cudart = _nothing

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def get_device_capability(self, device_id: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, message: str) -> nullcontext:
        return nullcontext()

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]


_init_process_group = torch.distributed.init_process_group


def _init_with_one_gloo(backend: str | None = None, *args, **kwargs) -> None:
    """verl asks for one backend for the host and one for the device: here both are the same."""
    return _init_process_group("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)


torch.distributed.init_process_group = _init_with_one_gloo

# Weights go from trainer to engine in shared memory; descriptors of it pass only between processes of one ancestor.
torch.multiprocessing.set_sharing_strategy("file_system")

# A reference policy's weights wait in pinned memory.
torch.Tensor.pin_memory = lambda self, *args: self
