"""What the steps of the acceptance share: the machine, the models, one engine at a time."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import torch

from profiler.launch import MANUAL
from profiler.worker import Worker
from sglang_pat.cpu import shim
from sglang_pat.host.sharing import SHARE_ENV
from sglang_pat.launch.gpu_memory import measure_gpus
from sglang_pat.memory.memory_plan import GIB
from sglang_pat.memory.shapes import ModelShape, read_config
from sglang_pat.testing import models
from sglang_pat.testing.prefork import Prefork
from sglang_pat.testing.server import find_rank_processes

STEADY = {"SGLANG_PAT_CHECK_STEADY": "1", "SGLANG_PAT_CHECK_AGREEMENT": "1"}
"""Environment in which a switch that makes a group, a pool or a graph fails, and ranks of a group are compared after
every switch.  It is not set where pauses are measured: they would get longer."""
LARGE = (("Llama-3.1-8B", 40 * GIB), ("Qwen3-4B", 16 * GIB), ("Qwen3-0.6B", 0))
"""Shapes, with the free bytes of a rank's GPU that each is for."""
MIXTURE = {"experts": 16, "chosen": 4, "expert_width": 256}
FEW_GRAPHS = ("--cuda-graph-max-bs", "16")
"""Flags of engines on a GPU with small batches: each layout takes long to capture graphs of all of SGLang's sizes."""
SHARING = ("--chunked-prefill-size", "2048", *FEW_GRAPHS)
"""Flags of engines whose ranks share a GPU: SGLang would choose as if each rank had a GPU of its own."""
START_SECONDS = 1800
"""Longest start of an engine: the first one of a machine compiles."""


@dataclass
class Bench:
    """The machine, the models and the engine that the steps share.

    Attributes:
        device: ``cpu`` or ``cuda``.
        ranks: number of ranks of the engine, which is the highest degree.
        folder: path of models, logs and profile.
        small, mixture: random float32 models, whose tokens must be equal; ``mixture`` has experts.
        sharing: whether all ranks run on one GPU.
        flags, large_flags: SGLang's flags of every engine, and of engines of the large model.
        best_static: seconds of the best static layout on the long-tail batch, once measured.
        prefork: interpreter that forks the engines, on a CPU; on a GPU each imports SGLang itself.
        large: model whose times and memory are measured; on a CPU it is ``small``.
    """

    device: str
    ranks: int
    folder: Path
    small: Path
    mixture: Path
    large: Path
    sharing: bool = False
    large_flags: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    best_static: float | None = None
    prefork: Prefork | None = None
    _engine: tuple[tuple, Worker] | None = None
    _used_before: list[int] | None = None
    """Bytes of each GPU before the engine started: this process has a context there, too."""

    @property
    def layout(self) -> tuple[str, ...]:
        return ("--tp", "1", "--dp", str(self.ranks))

    @property
    def few_graphs(self) -> tuple[str, ...]:
        return FEW_GRAPHS if self.device == "cuda" else ()

    @property
    def env(self) -> dict[str, str]:
        return {SHARE_ENV: "1"} if self.sharing else {}

    @property
    def model(self) -> ModelShape:
        return ModelShape.from_config(read_config(str(self.large)))

    @property
    def profile(self) -> Path:
        """Path of the large model's profile, which is there from the step :func:`~.steps.sweep` on."""
        return self.folder / "profile.json"

    @property
    def tail(self) -> list[int]:
        """Lengths of the answers of one long-tail batch, tokens."""
        if self.device == "cpu":
            return [16] * 6 + [60, 45]
        short, long = (16, 128) if self.sharing else (64, 1024)  # a step of ranks that share a GPU takes long
        return [short] * (16 * self.ranks - 2) + [long, long * 3 // 4]

    def count_answer_tokens(self, switches: int) -> int:
        """Tokens of an answer with room for ``switches``; on a GPU there are more steps between two of them."""
        return 40 + (8 if self.device == "cpu" else 64) * switches

    def start_engine(
        self, model: Path, *flags: str, policy: tuple[str, ...] = MANUAL, checks: dict[str, str] | None = None
    ) -> Worker:
        """An engine with these flags and ``checks``; the last one stays for the steps that ask for the same."""
        key = (model, flags, policy, checks)
        if self._engine is None or self._engine[0] != key:
            self.stop()
            if self.device == "cuda":
                self._used_before = [_read_used_bytes(gpu) for gpu in range(torch.cuda.device_count())]
            log = self.folder / "engine.log"
            worker = Worker(
                model, *self.layout, *self.flags, *flags, policy=policy, env=self.env | (checks or {}), log=log,
                prefork=self.prefork, seconds=START_SECONDS,
            )  # fmt: skip
            self._engine = key, worker
        return self._engine[1]

    def start_exact_engine(self, model: Path, *flags: str) -> Worker:
        """An engine whose tokens must be equal."""
        attention = ("--attention-backend", "triton") if self.device == "cuda" else ()  # the others have no float32
        return self.start_engine(model, "--dtype", "float32", *attention, *self.few_graphs, *flags, checks=STEADY)

    def start_default_engine(self) -> Worker:
        return self.start_engine(self.large, *self.large_flags)

    def stop(self) -> None:
        if self._engine is not None:
            self._engine[1].stop()
        self._engine = None

    def close(self) -> None:
        """End the engine, and the interpreter that forks engines."""
        self.stop()
        if self.prefork is not None:
            self.prefork.stop()

    def make_prompts(self, count: int, length: int) -> list[list[int]]:
        drawn = random.Random(0)
        return [[drawn.randrange(5, 500) for _ in range(length)] for _ in range(count)]

    def measure_memory(self, worker: Worker) -> list[int]:
        """Bytes of each rank: on a GPU what was taken since the engine started, on a CPU those of the process with its
        share of what processes have in common."""
        if self.device == "cuda":
            share, before = self.ranks if self.sharing else 1, self._used_before or [0] * torch.cuda.device_count()
            return [(_read_used_bytes(gpu) - used) // share for gpu, used in enumerate(before)]
        return [process.memory_full_info().pss for process in find_rank_processes(worker.list_children()).values()]


def prepare(device: str, ranks: int, folder: Path, sharing: bool, flags: tuple[str, ...] = ()) -> Bench:
    """Make the models, for engines that all have ``flags``."""
    cache = folder / "models"
    size = {"hidden": 128, "layers": 2} if device == "cpu" else {"hidden": 512, "layers": 4, "intermediate": 1024}
    small = models.make_random("llama", cache / "small", heads=8, kv_heads=8, **size)
    mixture = models.make_random("qwen3_moe", cache / "mixture", heads=8, kv_heads=8, **MIXTURE | size)
    large, large_flags = small, ("--dtype", "float32")
    if device == "cuda":
        # What moves between ranks that share a GPU moves slowly.
        free = 0 if sharing else measure_gpus(range(torch.cuda.device_count())).free
        name = next(name for name, least in LARGE if free >= least)
        large = models.make_shape(cache / name, name)
        large_flags = ("--load-format", "dummy")
    return Bench(
        device=device,
        ranks=ranks,
        folder=folder,
        small=small,
        mixture=mixture,
        large=large,
        sharing=sharing,
        large_flags=large_flags,
        flags=(*SHARING, *flags) if sharing else flags,
        prefork=Prefork() if device == "cpu" and shim.is_needed() else None,
    )


def _read_used_bytes(gpu: int) -> int:
    """Bytes in use on each GPU, by NVML if possible, which leaves no context of this process there."""
    try:
        return torch.cuda.device_memory_used(gpu)
    except (ImportError, RuntimeError):
        free, total = torch.cuda.mem_get_info(gpu)
        return total - free
