"""OpenRLHF 0.11.2 without GPUs.

Its sources say ``cuda`` in a few places; they are read with those words changed.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import types
from typing import Any

_CHANGED = {
    'f"cuda:{torch.cuda.current_device()}"': '"cpu"',
    "torch.cuda.current_device()": 'torch.device("cpu")',
    'init_device_mesh(\n            "cuda"': 'init_device_mesh(\n            "cpu"',
    "pin_memory=self.dataloader_pin_memory": "pin_memory=False",
    "from flash_attn.bert_padding import index_first_axis, pad_input, rearrange, unpad_input": (
        "index_first_axis = pad_input = rearrange = unpad_input = None"
    ),
    "from flash_attn.utils.distributed import all_gather": "all_gather = None",
}


NAME = "on_cpu.openrlhf_cpu"
"""Name of this module, also where it runs as ``__main__``."""


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str):
        source = self.get_data(self.path).decode()
        for old, new in _CHANGED.items():
            source = source.replace(old, new)
        return compile(source, self.path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path=None, target=None):
        if fullname.partition(".")[0] != "openrlhf":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.origin and spec.origin.endswith(".py"):
            spec.loader = _Loader(fullname, spec.origin)
        return spec


def install() -> None:
    """Prepare this process before OpenRLHF is imported."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import torch

    for name in ("synchronize", "set_device", "current_stream"):
        # One function each: torch.compile knows them by identity.
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
    torch.cuda.get_device_properties = lambda *args: types.SimpleNamespace(uuid=f"CPU-{os.environ.get('RANK', '0')}")
    # Weights lie in shared memory; descriptors of it pass only between processes of one ancestor.
    torch.multiprocessing.set_sharing_strategy("file_system")
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def setup() -> None:
    """Install this, then the product's own, in this process."""
    install()
    from sglang_pat.integrations.openrlhf import facade

    facade.install()


def main(argv: list[str]) -> None:
    """``python -m on_cpu.openrlhf_cpu GPUS RAY_FOLDER …``: the product's command without GPUs.

    OpenRLHF starts Ray, as on GPUs; Ray is told here that the machine has some, and calls :func:`setup` first.
    """
    setup()
    import ray

    from sglang_pat.integrations.openrlhf import facade
    from sglang_pat.integrations.openrlhf.__main__ import main as command

    init = ray.init
    gpus, folder, *others = argv

    def init_without_gpus(*, runtime_env: dict[str, Any]) -> Any:
        return init(
            num_cpus=32, num_gpus=int(gpus), include_dashboard=False, object_store_memory=500_000_000, _temp_dir=folder,
            runtime_env={**runtime_env, facade.HOOK: f"{NAME}.setup"},
        )  # fmt: skip

    ray.init = init_without_gpus
    command(others)


if __name__ == "__main__":
    main(sys.argv[1:])
