"""What is decided for GPUs before anything runs on one: arguments, memory, fingerprint, with H100s as stand-ins."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt import server_args as sglang_arguments

from profiler import launch
from sglang_pat import preflight
from sglang_pat.host import adapter, arguments
from sglang_pat.host.fixes import jit
from sglang_pat.memory.memory_plan import GIB
from sglang_pat.predict import profile as profiles

from .checkpoints import MIXTURES, write_mixture_config
from .graphs import OLD, has_prefill_graphs
from .machines import pretend, pretend_h100s

pytestmark = pytest.mark.contract

USED = [3 * GIB, 7 * GIB]
"""Bytes that others use, by GPU."""


@pytest.fixture
def h100s(monkeypatch):
    """What SGLang and we ask of the machine, as two H100 would answer."""
    pretend_h100s(monkeypatch)
    monkeypatch.setattr(arguments, "is_cuda", lambda: True)
    monkeypatch.delenv("SGLANG_PAT_SHARE_GPU", raising=False)
    cuda = {
        "is_available": lambda: True, "device_count": lambda: len(USED), "get_device_name": lambda *_: "NVIDIA H100",
        "get_device_properties": lambda gpu: SimpleNamespace(total_memory=79 * GIB),
        "device_memory_used": lambda gpu: USED[gpu],
    }  # fmt: skip
    for name, answer in cuda.items():
        monkeypatch.setattr(torch.cuda, name, answer)


def make_plain_arguments(model, **fields):
    """Make stock SGLang's arguments."""
    return adapter.arguments.resolve(sglang_arguments.ServerArgs(model_path=str(model), **fields))


def make_arguments(model, *flags: str, policy=launch.MANUAL):
    """Make the arguments of an engine of two ranks."""
    return launch.make_server_args(str(model), ["--tp", "1", "--dp", "2", *flags], policy)


def test_arguments_and_graphs(h100s, model):
    args = make_arguments(model)
    assert args.device == "cuda" and args.page_size == 1 and not args.disable_overlap_schedule
    assert (
        args.attention_backend == "fa3" and not has_prefill_graphs(args) and adapter.arguments.has_decode_graphs(args)
    )
    assert not args.disable_custom_all_reduce and args.chunked_prefill_size == 8192
    sizes = arguments.make_spec(args).graph_sizes
    assert max(sizes[1]) == 256 and sizes[2]
    assert not adapter.arguments.has_decode_graphs(
        make_arguments(model, "--pat-weights", "reshard", "--disable-cuda-graph")
    )


@pytest.mark.parametrize("kind", MIXTURES)
@pytest.mark.parametrize("base", [(2, 4), (4, 2)], ids=str)
def test_a_mixture_starts_without_a_flag(h100s, tmp_path, kind, base):
    """SGLang takes a fused all-reduce by itself for some of them from tp 2 on, which is refused."""
    model, (tp, dp) = write_mixture_config(tmp_path, kind), map(str, base)
    chosen = (False, True) if OLD else (None, "auto")
    field = "enable_flashinfer_allreduce_fusion" if OLD else "flashinfer_allreduce_fusion_backend"
    plain = make_plain_arguments(model, tp_size=base[0])
    assert getattr(plain, field) == chosen[kind == "qwen3_moe"], "SGLang no longer does so"
    args = make_arguments(model, "--tp", tp, "--dp", dp)
    assert getattr(args, field) == chosen[False] and args.moe_runner_backend == "triton"
    with pytest.raises(ValueError, match="enable-flashinfer-allreduce-fusion: leave it out"):
        make_arguments(model, "--tp", tp, "--dp", dp, "--enable-flashinfer-allreduce-fusion")


def test_on_blackwell_experts_run_in_triton(h100s, tmp_path, monkeypatch):
    """SGLang's own choice there permutes their rows."""
    pretend(monkeypatch, is_sm100_supported=True, is_blackwell_supported=True)
    flags = ("--attention-backend", "triton")
    model = write_mixture_config(tmp_path, "qwen3_moe")
    plain = make_plain_arguments(model, attention_backend="triton")
    assert plain.moe_runner_backend == "flashinfer_trtllm", "SGLang no longer does so"
    assert make_arguments(model, *flags).moe_runner_backend == "triton"
    with pytest.raises(ValueError, match="--moe-runner-backend flashinfer_trtllm: must be triton; leave it out$"):
        make_arguments(model, *flags, "--moe-runner-backend", "flashinfer_trtllm")


def test_memory_is_planned_for_the_gpu_that_has_least_as_preflight_does(h100s, model, monkeypatch, caplog):
    args = make_arguments(model, policy=())
    spec = arguments.make_spec(args)
    supply = spec.memory.supply
    assert (supply.kind, supply.free, supply.total) == ("cuda", 72 * GIB, 79 * GIB)
    planned = arguments.set_pool_size(args, spec.memory)
    assert 0 < planned.mem_fraction_static < 72 / 79 and planned.max_total_tokens > 100_000
    asked = SimpleNamespace(model_path=str(model), dtype="auto", tp=1, dp=2, gpus=None, max_total_tokens=None)
    found = preflight.plan_memory(asked)
    assert found.supply == supply and found.tokens == spec.memory.tokens
    monkeypatch.setenv("SGLANG_PAT_SHARE_GPU", "1")
    assert arguments.make_spec(args).memory.supply.free == 76 * GIB // 2, "both ranks run on the first one"
    monkeypatch.delenv("SGLANG_PAT_SHARE_GPU")
    with pytest.raises(ValueError, match="4 ranks need GPUs 0 to 3, 2 are visible: choose --tp and --dp"):
        arguments.make_spec(make_arguments(model, "--dp", "4"))


def test_a_profile_is_of_one_kind_of_gpu(h100s, model, monkeypatch):
    args = make_arguments(model)
    mark = arguments.make_fingerprint(args, args.read_config(), kv_tokens=4096, max_running=8)
    assert (mark.device, mark.attention, mark.kv_exchange) == ("NVIDIA H100", "fa3", "direct")
    profile = profiles.Profile(fingerprint=mark, complete=True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    with pytest.raises(profiles.ProfileError, match="device='NVIDIA H100', this deployment has 'NVIDIA H200'"):
        profiles.check_fits(profile, arguments.make_fingerprint(args, args.read_config()), "p.json")


@pytest.mark.parametrize(
    ("said", "line"),
    [("", None), ("ninja exited with status 1\na.cuh:95:52: error: type/value mismatch", "a.cuh:95:52: error: ")],
    ids=["compiles", "does not compile"],
)
def test_a_kernel_that_sglang_cannot_compile_is_found_before_an_engine_starts(h100s, monkeypatch, said, line):
    """g++ 12 cannot compile ``activation.cuh`` (SGLang's issue 25487).

    Every engine would end in its first step.
    """

    def silu_and_mul(tensor):
        if said:
            raise RuntimeError(said)

    stand_in = SimpleNamespace(
        zeros=lambda *_, **__: None, bfloat16=None, cuda=SimpleNamespace(synchronize=lambda: None)
    )
    monkeypatch.setattr(jit, "torch", stand_in)
    monkeypatch.setattr(adapter.kernels, "silu_and_mul", silu_and_mul)
    *_, (fine, what, finding) = preflight._check_devices()
    assert (fine, what) == (line is None, "SGLang's kernels")
    assert line is None or (f"cannot be compiled or run: {line}" in finding and "\n" not in finding)
