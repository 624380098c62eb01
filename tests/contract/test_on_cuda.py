"""What is decided for GPUs before anything runs on one: arguments, memory, fingerprint, with H100s as stand-ins."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sglang.srt import server_args as sglang_arguments

from profiler import launch
from profiler import sweep as sweeping
from sglang_pat import preflight
from sglang_pat.acceptance import answers, bench, cli, steps
from sglang_pat.fixes import jit
from sglang_pat.launch import args as arguments
from sglang_pat.launch import cuda, memory, start
from sglang_pat.launch.deployment import deployment
from sglang_pat.memory.demand import GIB
from sglang_pat.predict import profile as profiles

pytestmark = pytest.mark.contract

USED = [3 * GIB, 7 * GIB]
"""Bytes, by GPU."""
TRUE = "is_cuda is_hopper_with_cuda_12_3 is_sm90_supported is_flashinfer_available is_triton_kernels_available"
FALSE = "is_cpu is_hip is_npu is_xpu is_sm100_supported is_sm120_supported is_blackwell_supported"


@pytest.fixture
def h100s(monkeypatch):
    """What SGLang and we ask of the machine, as two H100 would answer."""
    answers_given = dict.fromkeys(TRUE.split(), True) | dict.fromkeys(FALSE.split(), False)
    answers_given |= {"get_device": "cuda", "get_device_sm": 90, "get_device_memory_capacity": 81559}
    answers_given["get_device_name"] = "NVIDIA H100 80GB HBM3"
    for name, answer in answers_given.items():
        monkeypatch.setattr(sglang_arguments, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(arguments, "is_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(USED))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(total_memory=79 * GIB))
    monkeypatch.setattr(torch.cuda, "device_memory_used", lambda gpu: USED[gpu])
    for name in ("SGLANG_PAT_SHARE_GPU", *launch.ENVIRONMENT):
        monkeypatch.setenv(name, os.environ.get(name, "1"))  # put back after the test
    monkeypatch.delenv("SGLANG_PAT_SHARE_GPU")


def made(model: Path, *flags: str, policy=launch.MANUAL):
    """The arguments of an engine of two ranks."""
    return launch.server_args(str(model), ["--tp", "1", "--dp", "2", *flags], policy)


def fingerprint(args, **sizes):
    return deployment(args, args.read_config(), **sizes)


class Enough(Exception):
    """The engine's flags are known."""


class Engine:
    """Takes note of the flags of every engine, and measures made-up pauses."""

    started: list[tuple] = []
    started_seconds = 40.0

    def __init__(self, model, *flags, policy, **more):
        assert more["seconds"] >= 1800, "the first one of a machine compiles"
        self.started.append((model, flags, policy))

    def do(self, function, **given):
        if function.__name__ == "pauses":
            about = {"pause_seconds": 0.1, "phases": {"kv": 0.1}, "moved_bytes": 8}
            return [{"from_tp": a, "to_tp": 3 - a} | about for a in (1, 2)]
        if function.__name__ == "prefilled":
            return 1.0
        raise Enough

    def stop(self):
        pass


@pytest.mark.parametrize("sharing", [False, True], ids=["a GPU each", "one GPU"])
def test_every_engine_of_the_acceptance_has_arguments_that_are_taken(h100s, model, monkeypatch, tmp_path, sharing):
    if sharing:
        monkeypatch.setenv("SGLANG_PAT_SHARE_GPU", "1")
    monkeypatch.setattr(Engine, "started", [])
    monkeypatch.setattr(bench, "Worker", Engine)
    monkeypatch.setattr(bench.Bench, "memory", lambda self, worker: [GIB])
    swept = []

    def run(prefork, module, argv, environment, seconds):
        swept.extend(argv)
        raise Enough

    monkeypatch.setattr(steps, "run", run)
    stand_in = bench.prepare("cuda", 2, tmp_path, sharing)
    monkeypatch.setitem(answers.MAKERS, answers.SMOLLM2, lambda: model)
    for step in steps.STEPS[steps.STEPS.index(steps.start) :]:
        if step is steps.adaptive:
            stand_in.profile.touch()
        with suppress(Enough):
            step(stand_in)
    assert len(Engine.started) == 7, "ours twice, PAT's way, float32, bfloat16, the real model, one with a policy"
    planned = steps._plan(stand_in)
    for folder, flags, policy in Engine.started:
        args = launch.server_args(str(folder), list(flags), policy)
        assert args.device == "cuda" and args.page_size == 1 and not args.disable_overlap_schedule
        assert args.attention_backend == ("triton" if args.dtype == "float32" else "fa3")
        assert args.disable_cuda_graph == (args.pat_weights == "reshard") and args.disable_piecewise_cuda_graph
        assert not args.disable_custom_all_reduce
        sizes = cuda.graph_sizes(args, args.read_config(), None)
        most = 16 if sharing or folder != stand_in.large else 256
        assert max(sizes[1]) == most and sizes[2]
        assert args.chunked_prefill_size == (2048 if sharing else 8192)
        if flags == Engine.started[0][1] and policy == launch.MANUAL:
            assert start.resolve(args).memory == planned
    options = sweeping.parse(swept)
    assert launch.server_args(options.model, options.flags).device == "cuda"
    assert str(options.out) == str(stand_in.profile)


@pytest.mark.parametrize(("ranks", "enough"), [(2, True), (cli.MOST_SHARING, True), (2 * cli.MOST_SHARING, False)])
def test_ranks_that_share_a_gpu_have_room_for_the_steps(h100s, monkeypatch, tmp_path, ranks, enough):
    """Those of the acceptance bring at most 16,384 tokens into one replica, and what is answered."""
    monkeypatch.setattr(torch.cuda, "device_memory_used", lambda gpu: GIB)
    found = steps._plan(bench.prepare("cuda", ranks, tmp_path, sharing=True))
    assert found.supply.total == 79 * GIB // ranks and (found.tokens > 20_000) == enough


def test_memory_is_planned_for_the_gpu_that_has_least(h100s, model, monkeypatch, caplog):
    args = made(model)
    spec = start.resolve(args)
    supply = spec.memory.supply
    assert (supply.kind, supply.free, supply.total) == ("cuda", 72 * GIB, 79 * GIB)
    planned = memory.with_pool(args, spec.memory)
    assert 0 < planned.mem_fraction_static < 72 / 79 and planned.max_total_tokens > 100_000
    monkeypatch.setenv("SGLANG_PAT_SHARE_GPU", "1")
    assert start.resolve(args).memory.supply.free == 76 * GIB // 2, "both ranks run on the first one"
    monkeypatch.delenv("SGLANG_PAT_SHARE_GPU")

    def no_nvml(gpu):
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    monkeypatch.setattr(torch.cuda, "device_memory_used", no_nvml)
    assert start.resolve(args).memory.supply.free == 79 * GIB
    assert "cannot read how much memory GPU 1 has free, taken as empty" in caplog.text
    with pytest.raises(ValueError, match="4 ranks need GPUs 0 to 3, 2 are visible: choose --tp and --dp"):
        start.resolve(made(model, "--dp", "4"))


def test_preflight_plans_what_the_start_will(h100s, model, monkeypatch):
    """Also on GPUs of which a quarter is in use, for ranks on some of them."""
    free = {0: 59 * GIB, 1: 61 * GIB, 2: 10 * GIB}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (free[gpu], 79 * GIB))
    monkeypatch.setattr(torch.cuda, "device_memory_used", lambda gpu: 79 * GIB - free[gpu])
    asked = SimpleNamespace(model_path=str(model), dtype="auto", tp=1, dp=2, gpus=None, max_total_tokens=None)
    found, args = preflight.plan_of(asked), made(model, policy=())
    started = start.resolve(args).memory
    assert (found.supply.free, found.supply.total) == (59 * GIB, 79 * GIB)
    assert found.supply == started.supply and found.tokens == started.tokens


def test_a_profile_is_of_one_kind_of_gpu(h100s, model, monkeypatch):
    mark = fingerprint(made(model), kv_tokens=4096, max_running=8)
    assert (mark.device, mark.attention, mark.kv_exchange) == ("NVIDIA H100 80GB HBM3", "fa3", "direct")
    profile = profiles.Profile(fingerprint=mark, complete=True)
    profiles.check_fits(profile, fingerprint(made(model)), "p.json")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    with pytest.raises(
        profiles.ProfileError, match="device='NVIDIA H100 80GB HBM3', this deployment has 'NVIDIA H200'"
    ):
        profiles.check_fits(profile, fingerprint(made(model)), "p.json")


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("", None),
        (
            "ninja exited with status 1\na.cuh(146): warning\na.cuh:95:52: error: type/value mismatch",
            "a.cuh:95:52: error: ",
        ),
        ("no kernel image is available for execution on the device", "no kernel image is available"),
    ],
    ids=["compiles", "does not compile", "does not run"],
)
def test_a_kernel_that_sglang_cannot_compile_is_found_before_an_engine_starts(monkeypatch, said, line):
    """As ``activation.cuh`` with g++ 12 (SGLang's issue 25487): every engine would end in its first step."""

    def silu_and_mul(tensor):
        if said:
            raise RuntimeError(said)

    stand_in = SimpleNamespace(
        zeros=lambda *_, **__: None, bfloat16=None, cuda=SimpleNamespace(synchronize=lambda: None)
    )
    monkeypatch.setattr(jit, "torch", stand_in)
    monkeypatch.setattr("sglang.jit_kernel.activation.silu_and_mul", silu_and_mul)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu: "NVIDIA H100")
    *_, (fine, what, finding) = preflight._devices()
    assert (fine, what) == (line is None, "SGLang's kernels")
    assert line is None or (f"cannot be compiled or run: {line}" in finding and "\n" not in finding)
