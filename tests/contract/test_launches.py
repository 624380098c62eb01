"""What a pause launches on a device does not depend on the number of requests: counted on torch's "meta" device.

On a GPU each operation on a tensor there is a kernel to launch, some 5 µs each, and the requests wait meanwhile.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt import server_args
from sglang.srt.managers import schedule_batch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.sampling import penaltylib, sampling_batch_info
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_pat.host import adapter, batches, kv
from sglang_pat.host.fixes import penalties
from sglang_pat.layout import ParallelLayout
from sglang_pat.rank import degrees
from sglang_pat.switch import install, requests

from .graphs import OLD

pytestmark = pytest.mark.contract

DEVICE = "meta"
SLOTS, TOKENS = 1 << 16, 40


class Launches(TorchDispatchMode):
    """Counts operations that a device would have to carry out: on its tensors, and no mere view."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        outputs = found if isinstance(found, (list, tuple)) else [found]
        there = any(isinstance(one, torch.Tensor) and one.device.type == DEVICE for one in outputs)
        if there and not func.is_view:
            self.counted[str(func)] += 1
        return found


def upload(values, dtype, device):
    """A stand-in for :func:`sglang_pat.switch.transfer.upload`, which makes one copy to a GPU."""
    return torch.as_tensor(values, dtype=dtype).to(device)


def request(number: int, sampling: dict) -> Req:
    params = SamplingParams(max_new_tokens=100, **sampling)
    params.normalize(SimpleNamespace(encode=list))
    prompt, output = map(adapter.rank.make_tokens, ([1000 + number, *range(TOKENS - 1)], [7, 8, 9]))
    req = Req(f"r{number}", "", prompt, params, return_logprob=True, vocab_size=512)
    req.output_ids = output
    req.tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=3)
    degrees.begin(req, tp=1)
    return req


def count_launches(count: int, sampling: dict, monkeypatch) -> Counter[str]:
    for module in (install, batches, kv, penalties, adapter.sampling):
        if hasattr(module, "upload"):
            monkeypatch.setattr(module, "upload", upload)
    args = SimpleNamespace(
        speculative_algorithm=None, enable_deterministic_inference=False, enable_custom_logit_processor=False,
        sampling_backend="flashinfer", enable_watermark=False,
    )  # fmt: skip
    if OLD:
        monkeypatch.setattr(server_args, "_global_server_args", args)
    else:
        args.deterministic = args.features = args
        monkeypatch.setattr(sampling_batch_info, "get_exec", lambda: args)
        monkeypatch.setattr(schedule_batch, "get_spec", lambda: args)
    monkeypatch.setattr(penaltylib, "BatchedPenalizerOrchestrator", penalties.OrderedPenalties)
    pool = TokenToKVPoolAllocator(SLOTS, torch.float32, DEVICE, None, False)
    tree = RadixCache.create_simulated(mock_allocator=pool)
    scheduler = SimpleNamespace(
        device=DEVICE, tree_cache=tree, token_to_kv_pool_allocator=pool,
        req_to_token_pool=ReqToTokenPool(256, 256, DEVICE, False), enable_overlap=False,
        model_config=SimpleNamespace(vocab_size=512), spec_algorithm=SpeculativeAlgorithm.from_string(None),
        grammar_manager=SimpleNamespace(grammar_queue=[]), waiting_queue=[], running_batch=None, chunked_req=None,
        _chunked_req_scheduled_last_iter=False, layouts=SimpleNamespace(device=DEVICE, layout=ParallelLayout(2, 1)),
        grammars=SimpleNamespace(keep=lambda reqs: None),
        future_map=SimpleNamespace(output_tokens_buf=torch.empty(257, dtype=torch.int64, device=DEVICE)),
        server_args=SimpleNamespace(strip_thinking_cache=False),
    )  # fmt: skip
    held = TOKENS + 2  # the last token has no KV yet
    reqs = [request(number, sampling) for number in range(count)]
    rows = [np.arange(1 + number * held, 1 + (number + 1) * held) for number in range(count)]
    parked = [request(number, sampling) for number in range(count, count + count // 2)]
    more = [np.arange(1 + number * held, 1 + (number + 1) * held) for number in range(count, count + count // 2)]
    arrivals = requests.IncomingRequests(
        decoding=[(req, row, 0) for req, row in zip(reqs, rows, strict=True)],
        waiting=parked, parked=[(req, row, 0) for req, row in zip(parked, more, strict=True)],
        place=np.arange(1 + (count + count // 2) * held),
    )  # fmt: skip
    with Launches() as launches:
        install.install_requests(scheduler, arrivals)
    assert len(scheduler.running_batch.reqs) == count and len(scheduler.waiting_queue) == count // 2
    return launches.counted


SAMPLING = {
    "greedy": {"temperature": 0},
    "penalties": {"temperature": 0.7, "frequency_penalty": 0.5, "presence_penalty": 0.1, "repetition_penalty": 1.1},
    "bias": {"logit_bias": {"5": 1.0}, "min_new_tokens": 20},
}


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
def test_adopting_launches_as_much_for_many_requests_as_for_few(sampling, monkeypatch):
    few, many = (count_launches(count, sampling, monkeypatch) for count in (4, 64))
    assert {name: (few[name], many[name]) for name in few | many if few[name] != many[name]} == {}
    assert 0 < many.total() <= 60


def test_a_launch_for_each_request_would_be_counted():
    with Launches() as launches:
        slots = torch.zeros(8, device=DEVICE)
        for part in slots.split([4, 4]):
            part.add_(1)
    assert launches.counted.total() == 3


def test_one_that_was_retracted_and_has_all_its_kv_is_so_no_more():
    """The next step is a decode step, in which SGLang drops the tokens of a retracted request: it would never end."""
    req = request(0, {})
    req.is_retracted = True
    table = ReqToTokenPool(4, 64, "cpu", False)
    kv.write_rows(SimpleNamespace(req_to_token_pool=table, device="cpu"), [req], [np.arange(5)])
    assert not req.is_retracted and kv.count_kv(req) == 5
