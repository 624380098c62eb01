"""What is made at start, so that no long prefill has to: every way in which SGLang reduces on a GPU."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.distributed.device_communicators import custom_all_reduce_v2 as custom
from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe

from sglang_pat.host import layers
from sglang_pat.host.kv import KvBuffers
from sglang_pat.layout import ParallelLayout
from sglang_pat.messages import NO_KV
from sglang_pat.rank.groups import GroupPool
from sglang_pat.switch import kv, requests
from sglang_pat.testing import models

from .checkpoints import Checkpoint
from .graphs import OLD

pytestmark = pytest.mark.contract


def record_reductions(world_size: int, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """What a rank with one group of so many ranks reduces at start."""
    reduced: list[torch.Tensor] = []
    pool = GroupPool.__new__(GroupPool)
    pool._tp = {
        size: SimpleNamespace(world_size=size, device=torch.device(device), all_reduce=reduced.append)
        for size in (1, world_size)
    }
    pool.warm_up(dtype)
    return reduced


def choose_way(world_size: int, blackwell: bool, monkeypatch):
    """SGLang's choice between its kernels and NCCL, a function of a tensor."""
    reduce = custom.CustomAllReduceV2.__new__(custom.CustomAllReduceV2)
    reduce.disabled, reduce.override_algo, reduce.world_size = False, None, world_size
    if OLD:
        monkeypatch.setattr(custom, "is_sm100_supported", lambda: blackwell)
        monkeypatch.setattr(custom, "THRESHOLD_2_SHOT_MAP", {})
        custom._init_config()
        mode = custom.THRESHOLD_2_SHOT_MAP[world_size]
        reduce.max_pull_size, reduce.max_push_size = 16 << 20, mode.one_shot_push_threshold
        reduce.max_size = max(reduce.max_pull_size, reduce.max_push_size)
        reduce.override_shot(None)
        return lambda t: reduce._determine_algo(t).is_push() if reduce.should_custom_ar(t) else "NCCL"
    from sglang.srt.distributed.device_communicators.configs import custom_all_reduce_v2 as configs

    config = (configs._sm100_configs(148) if blackwell else configs._sm90_configs(132))[world_size]
    sizes = [min(size, custom._DEFAULT_MAX_SIZE) for size in (config.max_push_bytes(world_size), config.max_pull_bytes)]
    reduce.config = config.clip(max_push_bytes=sizes[0], max_pull_bytes=sizes[1], world_size=world_size)
    reduce._eager_plans, reduce._eager_plans_config, reduce._graph_mode_allowed = {}, None, False
    # One module has its kernels of a type and world size.
    monkeypatch.setattr(custom, "get_all_reduce_module", lambda dtype, world_size: (dtype, world_size))
    return lambda t: reduce._eager_plan(t.nbytes, t.dtype)[0] if reduce.should_custom_ar(t) else "NCCL"


@pytest.mark.parametrize("blackwell", [False, True])
@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_all_kernels_of_custom_all_reduce_and_nccl(monkeypatch, blackwell, world_size, dtype):
    """SGLang chooses between them on either kind of GPU; on ``meta`` nothing is computed."""
    way = choose_way(world_size, blackwell, monkeypatch)
    tensors = record_reductions(world_size, "meta", dtype)
    assert {tensor.dtype for tensor in tensors} == {dtype}
    found = {way(tensor) for tensor in tensors}
    sizes = [16 << i for i in range(25)]
    assert found == {way(torch.empty(size // dtype.itemsize, dtype=dtype, device="meta")) for size in sizes}
    assert "NCCL" in found and len(found) == (3 if OLD else 2)


@pytest.mark.parametrize(("chosen", "compiled"), [(4, [(1, 4, 64), (4, 4, 64)]), (2, [])])
def test_the_sum_over_experts_of_few_tokens(monkeypatch, tmp_path, chosen, compiled):
    """SGLang uses ``torch.compile`` for it; for two experts a token it adds instead."""
    found: list[tuple[int, ...]] = []

    def record(each, out, factor):
        assert (each.dtype, out.shape, factor) == (torch.float32, each[:, 0].shape, 1.0)
        found.append(tuple(each.shape))

    monkeypatch.setattr(fused_moe, "moe_sum_reduce_torch_compile", record)
    checkpoint = Checkpoint(models.make_random("qwen3_moe", tmp_path, layers=2, chosen=chosen))
    model = checkpoint.empty(ParallelLayout(1, 1), 0)
    layers.compile_layers(torch.nn.ModuleList(layer.mlp for layer in model.model.layers), "meta")
    assert found == compiled, "of one layer, as all are alike"
    layers.compile_layers(model, "cpu")
    assert found == compiled


def test_on_a_cpu_little_is_reduced():
    assert [tensor.nbytes for tensor in record_reductions(2, "cpu", torch.bfloat16)] == [4096]


def test_memory_is_taken_for_kv_that_moves():
    """Pieces of a prompt are counted, too.

    A second attempt to get to the base layout does not fail for want of memory.
    """
    reserved: list[int] = []
    buffers = KvBuffers(k=[torch.zeros(4, 2, 8)], v=[torch.zeros(4, 2, 8)])
    layouts = SimpleNamespace(
        current=SimpleNamespace(kv=buffers),
        layout=ParallelLayout(2, 1),
        windows=None,
        config=SimpleNamespace(kv_exchange="direct"),
    )
    staging = SimpleNamespace(reserve=lambda out, into: reserved.append(out))

    def make(tokens: int, **others: int) -> SimpleNamespace:
        kept = {"kv_committed_len": tokens}
        return SimpleNamespace(**kept, kv=SimpleNamespace(**kept), **others)

    prompt = make(30, seqlen=500)
    for mode, chunked_req in itertools.product(("migrate", "auto", "recompute"), (None, prompt)):
        scheduler = SimpleNamespace(
            tree_cache=SimpleNamespace(is_chunk_cache=lambda: False, disable=False),
            chunked_req=chunked_req,
            chunked_prefill_size=20,
            running_batch=SimpleNamespace(reqs=[make(n) for n in (10, 100)]),
            waiting_queue=[],
            adaptive=SimpleNamespace(kv=mode),
        )
        for below in (0, 50, NO_KV):
            kv.reserve(layouts, staging, ParallelLayout(1, 2), requests.count_tokens_to_move(scheduler, below))
    slot, both, larger = 2 * 2 * 8 * 4, 110 + 2 * requests.GROWTH, 100 + requests.GROWTH
    pieces = 30 + 20
    migrate = [both, both, 0, both + pieces, both + pieces, 0]
    auto = [both, larger, 0, both + pieces, larger + pieces, 0]
    assert [size / slot for size in reserved] == [*migrate, *auto, *[0] * 6]


@pytest.mark.parametrize(
    ("old", "new", "rank", "out", "into"),
    [
        (1, 2, 0, 0, 1),
        (1, 2, 1, 1, 0),
        (1, 4, 4, 0, 3),
        (2, 1, 0, 1 / 2, 0),
        (4, 1, 4, 3 / 4, 0),
        (4, 2, 4, 1 / 2, 0),
        (2, 1, 1, 0, 0),
    ],
)
def test_memory_is_taken_for_kv_of_ranks_that_are_lent(old, new, rank, out, into):
    """The memory is given in parts of what this rank has; a lent one has nothing."""
    base, reserved, tokens = ParallelLayout(1, 8), [], 0 if rank % old else 64
    buffers = KvBuffers(k=[torch.zeros(4, 2, 8)], v=[torch.zeros(4, 2, 8)])
    layouts = SimpleNamespace(
        current=SimpleNamespace(kv=buffers), layout=base.with_stride(old), rank=rank, windows=None,
        config=SimpleNamespace(kv_exchange="alltoall"),
    )  # fmt: skip
    staging = SimpleNamespace(reserve=lambda *sizes: reserved.extend(sizes))
    kv.reserve(layouts, staging, base.with_stride(new), tokens)
    held = tokens * 2 * 2 * 8 * 4
    assert reserved == [out * held, into * held]
