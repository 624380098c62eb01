"""Requests that wait and have KV: found in SGLang's radix tree, where an earlier switch has left it, with its slots."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from sglang.srt.managers import schedule_batch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_pat.host import adapter
from sglang_pat.host.fixes import outputs
from sglang_pat.host.requests import is_in_pieces
from sglang_pat.switch import requests

pytestmark = pytest.mark.contract

PROMPT = [5, 6, 7, 8]


def request(rid: str, output: list[int], place: int | None = None) -> SimpleNamespace:
    """Make a request; ``place`` is its line in the request table, None if it waits."""
    held = len(PROMPT) + len(output) - 1
    made = SimpleNamespace(
        rid=rid, origin_input_ids=PROMPT, output_ids=output, extra_key=None, req_pool_idx=place, kv_committed_len=held,
        extend_batch_idx=1 if output else 0, cache_salt=None, positional_embed_overrides=None,
        seqlen=len(PROMPT) + len(output),
    )  # fmt: skip
    made.kv = made  # where 0.5.23 has its KV
    return made


def scheduler(decoding: list, waiting: list, tree: RadixCache, paused: bool = False) -> SimpleNamespace:
    table = torch.zeros((4, 16), dtype=torch.int32)
    for req in decoding:
        table[req.req_pool_idx] = torch.arange(16) + 100 * (1 + req.req_pool_idx)
    return SimpleNamespace(
        tree_cache=tree, running_batch=SimpleNamespace(reqs=decoding), waiting_queue=waiting, chunked_req=None,
        grammar_manager=SimpleNamespace(grammar_queue=[]), req_to_token_pool=SimpleNamespace(req_to_token=table),
        device="cpu", _paused_by_client=paused, server_args=SimpleNamespace(strip_thinking_cache=False),
    )  # fmt: skip


def leave(tree: RadixCache, req: SimpleNamespace, slots: list[int]) -> None:
    """Leave the KV of a request in the tree, as a switch does with one that it parks."""
    key = adapter.rank.make_key(req, (req.origin_input_ids + req.output_ids)[:-1])
    tree.insert(InsertParams(key=key, value=torch.tensor(slots)))


def test_those_that_are_parked_offer_their_kv_after_those_that_decode():
    tree = RadixCache.create_simulated()
    decodes, fresh = request("decodes", [1, 2, 3], place=2), request("fresh", [])
    parked = [request("one", [11, 12, 13]), request("two", [11, 21])]
    leave(tree, parked[0], [31, 32, 33, 34, 35, 36])
    leave(tree, parked[1], [31, 32, 33, 34, 35])
    found, waiting, rows = requests.split_by_kv(scheduler([decodes], [parked[0], fresh, parked[1]], tree))
    assert found == [decodes, *parked] and waiting == [fresh]
    assert [row.tolist() for row in rows] == [
        [300, 301, 302, 303, 304, 305],
        [31, 32, 33, 34, 35, 36],
        [31, 32, 33, 34, 35],
    ]
    assert all(row.dtype == np.int64 for row in rows)


def test_who_has_lost_some_of_its_kv_brings_the_rest():
    tree = RadixCache.create_simulated(mock_allocator=Mock(device="cpu"))
    parked, other = request("one", [11, 12, 13]), request("two", [21, 22])
    leave(tree, parked, [31, 32, 33, 34, 35, 36])
    leave(tree, other, [31, 32, 33, 34, 41])
    tree.evict(EvictParams(num_tokens=2))
    lost = request("lost all", [51])
    lost.origin_input_ids = [9, 9]
    found, waiting, rows = requests.split_by_kv(scheduler([], [parked, other, lost], tree))
    assert (found, waiting) == ([parked, other], [lost])
    assert [row.tolist() for row in rows] == [[31, 32, 33, 34], [31, 32, 33, 34, 41]]


def begun(rid: str, place: int | None = None) -> SimpleNamespace:
    """Make a request of whose prompt two tokens are computed."""
    req = request(rid, [], place)
    req.extend_batch_idx, req.kv_committed_len = 1, 2
    return req


@pytest.mark.parametrize("paused", [False, True])
def test_prompts_in_pieces_bring_what_is_computed(paused):
    """The prompt that is being computed brings its KV, as do those that an earlier switch brought.

    They come last, as they do not decode.
    """
    tree = RadixCache.create_simulated()
    fresh, waits, now = request("fresh", []), begun("waits"), begun("now", place=1)
    tree.insert(InsertParams(key=adapter.rank.make_key(waits, PROMPT[:2]), value=torch.tensor([31, 32])))
    rank = scheduler([], [fresh, waits], tree, paused)
    rank.chunked_req, rank.req_to_token_pool.req_to_token[1] = now, torch.arange(16) + 200
    found, waiting, rows = requests.split_by_kv(rank)
    assert (found, waiting) == ([waits, now], [fresh])
    assert [row.tolist() for row in rows] == [[31, 32], [200, 201]]


def test_without_a_tree_nothing_is_parked():
    tree = RadixCache.create_simulated(disable=True)
    found, waiting, rows = requests.split_by_kv(scheduler([], [request("one", [11])], tree))
    assert (found, rows) == ([], []) and len(waiting) == 1


def test_in_a_pause_nobody_goes_on():
    tree = RadixCache.create_simulated()
    retracted = request("one", [11, 12, 13])
    leave(tree, retracted, [31, 32, 33, 34, 35, 36])
    found, waiting, rows = requests.split_by_kv(scheduler([], [retracted], tree, paused=True))
    assert (found, rows) == ([], []) and waiting == [retracted]


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_prompt_in_pieces_begins_again_when_all_are_retracted(monkeypatch, mode):
    """New weights may come, and no logprob of it is of the old ones."""
    from sglang_pat.host import scheduler as host

    monkeypatch.setattr(host.RankScheduler, "pause_generation", lambda *_: None)
    rank = host.AdaptiveScheduler.__new__(host.AdaptiveScheduler)
    waits = Req("waits", "", adapter.rank.make_tokens(PROMPT), SamplingParams(), return_logprob=True)
    waits.extend_batch_idx, waits.input_token_logprobs, waits.temp_input_top_logprobs_val = 1, [-0.5, -0.25], [[-1.0]]
    rank.waiting_queue = [waits]
    rank.pause_generation(SimpleNamespace(mode=mode))
    kept = None if mode == "retract" else [-0.5, -0.25]
    assert waits.input_token_logprobs == kept and (waits.temp_input_top_logprobs_val is None) == (kept is None)
    assert is_in_pieces(waits) == (kept is not None)


def test_who_waits_keeps_its_routed_experts(monkeypatch):
    """A request that is retracted takes them along; of one that is parked the tree's slots have them; else none are
    given, not some."""
    rows = torch.arange(40, dtype=torch.uint8).view(20, 1, 2)
    capturer = SimpleNamespace(host_cache=SimpleNamespace(buffer=rows))
    monkeypatch.setattr(outputs, "get_global_experts_capturer", lambda: capturer)
    owner = ScheduleBatch if adapter.FOLDER == "v0_5_12" else schedule_batch

    def release_req(*_, **__):
        rows.view(-1)[8:].zero_()  # slots are others'

    monkeypatch.setattr(owner, "release_req", release_req)
    outputs.keep_experts()
    reqs = [
        SimpleNamespace(
            return_routed_experts=True, routed_experts_start_len=1, seqlen=4, req_pool_idx=0, routed_experts=None,
            kv=SimpleNamespace(req_pool_idx=0),
        )
        for _ in range(3)
    ]  # fmt: skip
    pool = SimpleNamespace(req_to_token=torch.tensor([[5, 6, 7, 0]]))
    if owner is ScheduleBatch:
        owner.release_req(SimpleNamespace(reqs=reqs[:1], req_to_token_pool=pool), 0, 0, None)
    else:
        owner.release_req(req=reqs[0], req_to_token_pool=pool, remaing_req_count=0)
    for req, slots in zip(reqs, ([], [3, 1, 2], [3, 1]), strict=True):
        outputs.collect_experts(req, torch.tensor(slots, dtype=torch.int64))
    assert reqs[0].routed_experts.tolist() == [[[12, 13]], [[14, 15]]]
    assert reqs[1].routed_experts.tolist() == [[[2, 3]], [[4, 5]]] and reqs[1].routed_experts.dtype == torch.int32
    assert reqs[2].routed_experts is None


def append_states_of_old(reqs: list, states: torch.Tensor, lengths: list[int]) -> None:
    from sglang_pat.host.v0_5_12.outputs import OwnRows

    rows = OwnRows(states, SimpleNamespace(reqs=reqs), lengths)
    for req in reqs:
        req.hidden_states.append(rows[:].tolist())


def append_states_of_new(reqs: list, states: torch.Tensor, lengths: list[int]) -> None:
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

    from sglang_pat.host.v0_5_23.components import MendedResultProcessor

    made, at = MendedResultProcessor.__new__(MendedResultProcessor), 0
    for req, length in zip(reqs, lengths, strict=True):
        at = made._append_prefill_hidden_states(
            req=req, logits_output=SimpleNamespace(hidden_states=states), hidden_state_offset=at,
            capture_hidden_mode=CaptureHiddenMode.FULL, extend_input_len=length,
        )  # fmt: skip


def test_hidden_states_of_tokens_that_are_computed_again_are_not_told_again():
    """A client gets those of the prompt, and of each token."""
    reqs = [
        SimpleNamespace(
            output_ids=output, hidden_states=[], return_hidden_states=True, finished=lambda: False, is_retracted=False,
            is_chunked=0,
        )
        for output in ([], [11, 12])
    ]  # fmt: skip
    append = append_states_of_old if adapter.FOLDER == "v0_5_12" else append_states_of_new
    append(reqs, torch.arange(10.0).view(5, 2), [2, 3])
    assert [req.hidden_states for req in reqs] == [[[[0, 1], [2, 3]]], [[8, 9]]]
