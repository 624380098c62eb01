"""Stands for the package ``vllm``, which OpenRLHF imports: a handful of names, none of which needs a GPU.

Installed also where the real one is: its weight-update group cannot be joined by SGLang's ranks.
"""

from __future__ import annotations

import functools
import importlib.machinery
import sys
import types
import uuid
from dataclasses import dataclass
from typing import Any

VERSION = "0.16.0"
"""Version of vLLM that is claimed: OpenRLHF sets variables for the NCCL of older ones."""


@dataclass
class SamplingParams:
    """Sampling parameters that OpenRLHF and its agents give; see vLLM's for what they mean."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logprobs: int | None = None


class TokensPrompt(dict):
    """A prompt of token ids."""


class StatelessProcessGroup:
    """The members of a weight-update group: ``host``, ``port``, ``rank`` and ``world_size``."""

    @staticmethod
    def create(**named: Any) -> dict[str, Any]:
        return named


class PyNcclCommunicator:
    """The trainer's end of the group that the engine's ranks join (``init_weights_update_group``)."""

    def __init__(self, group: dict[str, Any], device: Any) -> None:
        import torch

        from sglang_pat.host.inprocess import init_custom_process_group

        self._pg: Any = init_custom_process_group(
            backend="nccl" if torch.cuda.is_available() else "gloo",
            init_method=f"tcp://{group['host']}:{group['port']}",
            world_size=group["world_size"],
            rank=group["rank"],
            group_name=GROUP,
        )

    def broadcast(self, tensor: Any, src: int, stream: Any = None) -> None:
        import torch

        torch.distributed.broadcast(tensor, src=src, group=self._pg)


GROUP = "openrlhf"
"""Name of the group: OpenRLHF's own."""

_MODULES: dict[str, dict[str, Any]] = {
    "vllm": {"__version__": VERSION, "SamplingParams": SamplingParams},
    "vllm.inputs": {"TokensPrompt": TokensPrompt},
    "vllm.utils": {"random_uuid": lambda: uuid.uuid4().hex},
    "vllm.distributed": {},
    "vllm.distributed.utils": {"StatelessProcessGroup": StatelessProcessGroup},
    "vllm.distributed.device_communicators": {},
    "vllm.distributed.device_communicators.pynccl": {"PyNcclCommunicator": PyNcclCommunicator},
}


def install() -> None:
    """Make ``import vllm`` find the names above."""
    for name, content in _MODULES.items():
        module = types.ModuleType(name, __doc__)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        vars(module).update(content)
        sys.modules[name] = module
    for name in _MODULES:
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, sys.modules[name])


VISIBLE = "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"
"""Variable of Ray's: with 0 it hides no GPU from an actor that reserves none, as by default in Ray 2.60, but not in
older ones.  The actor of an engine of several GPUs is such a one: OpenRLHF reserves them beside it."""
HOOK = "worker_process_setup_hook"
"""Key in a runtime environment of Ray's: name of the function that each process of the job calls first."""


def install_in_workers() -> None:
    """Have :func:`install` called in each process of the job.

    OpenRLHF starts Ray from this one, with variables of its own and no hook.
    """
    import ray

    init = ray.init

    @functools.wraps(init)
    def init_with_hook(*args: Any, runtime_env: dict[str, Any] | None = None, **named: Any) -> Any:
        environment = runtime_env or {}
        ours = {HOOK: f"{__name__}.install", "env_vars": {VISIBLE: "0"} | environment.get("env_vars", {})}
        return init(*args, runtime_env=environment | ours, **named)

    ray.init = init_with_hook
