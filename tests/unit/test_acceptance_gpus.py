"""What the acceptance reads of GPUs and decides by it, on stand-ins for them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_pat.acceptance import bench, cli
from sglang_pat.memory.machine import GIB
from sglang_pat.testing import shapes

pytestmark = pytest.mark.unit

USED = [5 * GIB, 1 * GIB]
"""Bytes, by GPU."""


@pytest.fixture
def gpus(monkeypatch):
    """Two of 80 GiB, as NVML reads them."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(USED))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(total_memory=80 * GIB))
    monkeypatch.setattr(torch.cuda, "device_memory_used", lambda gpu: USED[gpu])
    monkeypatch.setattr(shapes, "write_tokenizer", lambda *_: None)  # of 150,000 words


def no_nvml(gpu):
    raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")


def test_free_memory_is_that_of_the_gpu_that_has_least(gpus, monkeypatch):
    assert bench.free_on_gpus() == 75 * GIB
    monkeypatch.setattr(torch.cuda, "device_memory_used", no_nvml)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (80 * GIB - 2 * USED[gpu], 80 * GIB))
    assert bench.free_on_gpus() == 70 * GIB


@pytest.mark.parametrize(
    ("sharing", "used", "model"),
    [(False, 5, "Llama-3.1-8B"), (False, 60, "Qwen3-4B"), (False, 70, "Qwen3-0.6B"), (True, 5, "Qwen3-0.6B")],
)
def test_the_large_model_is_chosen_by_memory(gpus, tmp_path, monkeypatch, sharing, used, model):
    """Where ranks share a GPU it is the smallest one: what moves between them moves slowly."""
    monkeypatch.setattr(torch.cuda, "device_memory_used", lambda gpu: used * GIB)
    made = bench.prepare("cuda", 2, tmp_path, sharing, ("--attention-backend", "triton"))
    assert made.large.name == model and made.large_flags == ("--load-format", "dummy")
    assert made.prefork is None, "the driver does not survive a fork"
    assert made.env == ({"SGLANG_PAT_SHARE_GPU": "1"} if sharing else {})
    assert len(made.tail) == 32 and max(made.tail) == (128 if sharing else 1024)
    assert made.memory(None) == [used * GIB // (2 if sharing else 1)] * 2, "of the engine, which took all of it"


def test_engines_on_a_gpu(gpus, tmp_path, monkeypatch):
    """In float32 only Triton's attention works there; small batches have few graphs."""
    started = []
    monkeypatch.setattr(
        bench, "Worker", lambda *given, **more: started.append((given, more)) or SimpleNamespace(stop=int)
    )
    made = bench.prepare("cuda", 2, tmp_path, True, ("--grammar-backend", "none"))
    made.exact()
    (model, *flags), more = started[0]
    assert model == made.small
    assert (
        flags
        == (
            "--tp 1 --dp 2 --chunked-prefill-size 2048 --cuda-graph-max-bs 16 --grammar-backend none --dtype float32 "
            "--attention-backend triton --cuda-graph-max-bs 16"
        ).split()
    )
    assert more["env"]["SGLANG_PAT_SHARE_GPU"] == "1" and more["env"]["SGLANG_PAT_CHECK_STEADY"] == "1"
    made.usual()
    assert started[1][1]["env"] == {"SGLANG_PAT_SHARE_GPU": "1"}, "checks would lie in the pauses that are measured"


def test_memory_of_an_engine_is_what_it_has_taken_since_its_start(gpus, tmp_path, monkeypatch):
    """This process has a context on the first GPU, too, since it has measured kernels there."""
    used = list(USED)
    monkeypatch.setattr(torch.cuda, "device_memory_used", lambda gpu: used[gpu])
    monkeypatch.setattr(bench, "Worker", lambda *given, **more: SimpleNamespace())
    made = bench.prepare("cuda", 2, tmp_path, False)
    worker = made.exact()
    used[:] = [bytes_used + 3 * GIB for bytes_used in used]
    assert made.memory(worker) == [3 * GIB] * 2


def test_more_ranks_than_one_gpu_has_room_for_are_refused_in_one_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert cli.main(["--device", "cuda", "--ranks", "8", "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == "error: --ranks 8: one GPU has room for 2 or 4 ranks; give one of these\n"
