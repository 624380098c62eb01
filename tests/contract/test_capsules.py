"""Capsules: what of a request of SGLang's goes over, and how."""

from __future__ import annotations

import pickle
import pickletools
import random
from array import array
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from sglang.srt.managers import schedule_batch
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache import common
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_pat.host import adapter, kv
from sglang_pat.host import tree as host_tree
from sglang_pat.host.requests import LOGPROBS
from sglang_pat.rank import degrees, speculation
from sglang_pat.switch import requests
from sglang_pat.switch.install import _Slots

from ..unit.lines_run import lines_run
from .graphs import OLD

pytestmark = pytest.mark.contract


get_logprobs = adapter.rank.get_logprobs
GIVEN_CUSTOM = {"budget": 4}


def request(rid: str = "r", prompt: tuple[int, ...] = (5, 6, 7), custom: dict | None = None, **options) -> Req:
    params = SamplingParams(custom_params=custom)
    made = Req(rid, "", adapter.rank.make_tokens(prompt), params, return_logprob=True, **options)
    made.pat_request = SimpleNamespace(input_ids=made.origin_input_ids)
    made.pat_prompt, made.pat_sealed = array("I", prompt), None
    degrees.begin(made, tp=1)
    speculation.begin(made)
    return made


def decode(req: Req, tokens: int) -> None:
    """SGLang's account of so many more tokens, with all kinds of logprobs."""
    kept = get_logprobs(req)
    for number in range(len(req.output_ids), len(req.output_ids) + tokens):
        req.output_ids.append(number)
        kept.output_token_logprobs_val.append(-number / 7)
        kept.output_token_logprobs_idx.append(number)
        kept.output_top_logprobs_val.append([-number / 7, -number / 3])
        kept.output_top_logprobs_idx.append([number, number + 1])
        kept.output_token_ids_logprobs_val.append([-number / 5])
        kept.output_token_ids_logprobs_idx.append([9])


def prefill(req: Req) -> None:
    """Give ``req`` the logprobs of its prompt, and its first token."""
    kept = get_logprobs(req)
    kept.input_token_logprobs_val, kept.input_token_logprobs_idx = [None, -0.5, -0.25], [5, 6, 7]
    kept.input_top_logprobs_val, kept.input_top_logprobs_idx = [None, [-1.0], [-2.0]], [None, [6], [7]]
    kept.input_token_ids_logprobs_val, kept.input_token_ids_logprobs_idx = [None, [-3.0], [-4.0]], [None, [9], [9]]
    decode(req, 1)


def stream_of_old(req: Req, outlet: SimpleNamespace, no_drafts: SimpleNamespace) -> None:
    from sglang.srt.managers.scheduler_output_processor_mixin import SchedulerOutputProcessorMixin

    played = SimpleNamespace(
        stream_interval=1, disaggregation_mode=None, attn_tp_rank=0, dp_rank=None, get_loads=lambda _: None,
        server_args=SimpleNamespace(enable_request_time_stats_logging=False), _get_cached_tokens_details=lambda _: None,
        spec_algorithm=no_drafts, send_to_detokenizer=outlet,
    )  # fmt: skip
    SchedulerOutputProcessorMixin.stream_output_generation(played, [req], return_logprob=True)


def stream_of_new(req: Req, outlet: SimpleNamespace, no_drafts: SimpleNamespace) -> None:
    from sglang.srt.managers.scheduler_components import output_streamer

    args = SimpleNamespace(
        enable_request_time_stats_logging=False, stream_interval=1, weight_version="", attn_tp_rank=0, dp_rank=None
    )
    streamer = output_streamer.SchedulerOutputStreamer(
        send_to_detokenizer=outlet, tree_cache=None, server_args=args, is_generation=True, spec_algorithm=no_drafts,
        disaggregation_mode=None, enable_hicache_storage=lambda: False,
    )  # fmt: skip
    asked = dict.fromkeys(("get_serving", "get_parallel", "get_observability"), lambda: args)
    with mock.patch.multiple(output_streamer, **asked):
        streamer.stream_output([req], return_logprob=True)


def stream_output(req: Req) -> list[tuple]:
    """What SGLang's own code sends about ``req`` now: tokens and all logprobs."""
    sent: list = []
    outlet, no_drafts = SimpleNamespace(send_output=sent.append), SimpleNamespace(is_none=lambda: True)
    (stream_of_old if OLD else stream_of_new)(req, outlet, no_drafts)
    names = ["rids", "finished_reasons", "decode_ids", "output_ids", *LOGPROBS]
    return [(name, repr(getattr(output, name))) for output in sent for name in names]


def move_request(req: Req) -> Req:
    """``req`` after a switch to other ranks."""
    asked = get_logprobs(req)
    options = {"top_logprobs_num": asked.top_logprobs_num, "token_ids_logprob": asked.token_ids_logprob}
    options |= {"custom_logit_processor": req.custom_logit_processor, "custom": GIVEN_CUSTOM.copy()}
    other = request(stream=req.stream, **options)
    before = {name: repr(getattr(asked, name, None)) for name in LOGPROBS}
    requests.restore_state(other, pickle.loads(pickle.dumps(requests.serialize_request(req))))
    assert before == {name: repr(getattr(asked, name, None)) for name in LOGPROBS}, "it may go on where it is"
    return other


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("every", [1, 7, 49, 50, 51, 90])
def test_a_client_gets_the_same_logprobs_whatever_switches_there_are(stream, every):
    """``every``: tokens from switch to switch; what is not streamed SGLang sends fifty at a time."""
    options = {"stream": stream, "top_logprobs_num": 2, "token_ids_logprob": [9]}
    stays, goes = request(**options), request(**options)
    for step in range(171):
        if step % every == 0:
            goes = move_request(goes)
        for req in (stays, goes):
            prefill(req) if step == 0 else decode(req, 1)
            req.finished_reason = FINISH_LENGTH(171) if step == 170 else None
        assert stream_output(stays) == stream_output(goes), step
    assert stays.finished_output and goes.input_logprob_sent


def opcodes(capsule: requests.Capsule) -> int:
    """Steps of reading it."""
    return sum(1 for _ in pickletools.genops(pickle.dumps(capsule, pickle.HIGHEST_PROTOCOL)))


def count_work(tokens: int) -> tuple[int, int, int, int]:
    """Lines of :func:`requests.serialize_request` and :func:`requests.rebuild_request`, steps of reading the
    capsule, tokens with
    logprobs in it: of a request with so many tokens that is on its way."""
    req = request(stream=False, top_logprobs_num=2, token_ids_logprob=[9])
    prefill(req)
    while len(req.output_ids) < tokens:
        decode(req, 1)
        stream_output(req)
    req.pat_sealed = pickle.dumps((SimpleNamespace(input_ids=None), req.pat_prompt))
    ranks = SimpleNamespace(
        grammars=SimpleNamespace(use_for_rebuild=lambda *_: nullcontext()),
        construct=lambda *_: request(stream=False, top_logprobs_num=2, token_ids_logprob=[9]),
    )
    captured, capsule = lines_run(lambda: requests.serialize_request(req))
    rebuilt, other = lines_run(lambda: requests.rebuild_request(ranks, capsule))
    assert other.output_ids == req.output_ids
    return captured, rebuilt, opcodes(capsule), len(capsule.state["output_top_logprobs_val"].entries)


def test_a_request_costs_a_pause_the_same_with_any_number_of_tokens():
    """Not of its prompt or of its response, whose logprobs the client has already."""
    few, many = count_work(110), count_work(4010)
    assert few == many and few[-1] == 10


def make_rank(tree: RadixCache, pool: TokenToKVPoolAllocator, strips: bool = False) -> SimpleNamespace:
    """A scheduler with this tree and pool; ``strips``: its ``--strip-thinking-cache``."""
    return SimpleNamespace(
        tree_cache=tree, token_to_kv_pool_allocator=pool, device="cpu", layouts=SimpleNamespace(device="cpu"),
        server_args=SimpleNamespace(strip_thinking_cache=strips),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_what_a_switch_brings_is_found_in_the_tree(seed):
    """Requests of two groups, some with a common prefix: each finds its KV there, and no slot is lost.  What decodes
    holds its part of the tree, what waits for a decode slot does not."""
    rng = random.Random(seed)
    pool = TokenToKVPoolAllocator(400, torch.float32, "cpu", None, False)
    tree = RadixCache.create_simulated(mock_allocator=pool)
    slots = _Slots(make_rank(tree, pool), np.arange(401))
    content = torch.zeros(401, dtype=torch.int64)
    entered, decoding = [], []
    for group in range(2):
        mine: list[tuple[list[int], torch.Tensor]] = []
        for number in range(4):
            tokens, row, shared = [], pool.free_pages[:0], 0
            if mine and rng.random() < 0.6:
                of, places = rng.choice(mine)
                shared = rng.randint(1, len(of))
                tokens, row = of[:shared], places[:shared]
            # The two groups have some sequences in common.
            more = [1000 * (number + rng.choice([0, 10 * group])) + i for i in range(rng.randint(1, 12))]
            row = torch.cat([row, pool.alloc(len(more))])
            tokens = tokens + more
            content[row] = torch.tensor(tokens)
            mine.append((tokens, row))
            req = request(f"{group}-{number}", tuple(tokens[:1]))
            req.output_ids = adapter.rank.make_tokens([*tokens[1:], 3])  # the last token has no KV yet
            decodes = rng.random() < 0.5
            found = slots.enter(req, row.numpy(), shared, decodes)
            assert content[found].tolist() == tokens
            entered.append(tokens)
            decoding += [req] * decodes
    slots.upload()
    for tokens in entered:
        key = adapter.rank.make_key(None, [*tokens, 3])
        found = adapter.rank.read_slots(tree, tree.match_prefix(MatchPrefixParams(key=key)))
        assert content[found].tolist() == tokens
    assert pool.available_size() + tree.total_size() == 400
    held = {node for req in decoding for node in path(req.last_node if OLD else req.lock.node)}
    assert tree.protected_size() == sum(len(node.key) for node in held if node is not tree.root_node)
    for req in decoding:
        tree.dec_lock_ref(req.last_node) if OLD else tree.unlock(req.lock)
    assert tree.total_size() == tree.evictable_size(), "what decodes may take its room"


@pytest.mark.parametrize("decodes", [True, False])
def test_what_sglang_strips_off_the_cache_is_not_in_the_tree(monkeypatch, decodes):
    """SGLang frees all slots after the prompt at the end of a request that has reasoned, whoever has them."""
    bag = SimpleNamespace(strip_thinking_cache=True, page_size=1, speculative_algorithm=None)
    for module in (schedule_batch, common):
        for name in ("get_global_server_args", "get_serving", "get_spec"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda: bag)
    pool = TokenToKVPoolAllocator(40, torch.float32, "cpu", None, False)
    tree = RadixCache.create_simulated(mock_allocator=pool)
    rank = make_rank(tree, pool, strips=True)
    rank.req_to_token_pool = tree.req_to_token_pool = ReqToTokenPool(4, 40, "cpu", False)
    req = request(prompt=(5, 6, 7))
    req.output_ids, req.reasoning_tokens = adapter.rank.make_tokens([11, 12, 13]), 3
    slots = _Slots(rank, np.arange(41))
    row = slots.enter(req, pool.alloc(5).numpy(), 0, decodes)
    slots.upload()
    assert tree.total_size() == 3, "the prompt"
    if decodes:
        kv.write_rows(rank, [req], [row])
        req.finished_reason = FINISH_LENGTH(3)
        common.release_kv_cache(req, tree, **({"is_insert": True} if OLD else {"checkpoint": True}))
    assert pool.available_size() + tree.total_size() == 40 and tree.evictable_size() == 3


@pytest.mark.parametrize("decodes", [True, False])
def test_kv_of_given_embeddings_is_not_in_the_tree(decodes):
    """Others with the same tokens would find it."""
    pool = TokenToKVPoolAllocator(40, torch.float32, "cpu", None, False)
    tree = RadixCache.create_simulated(mock_allocator=pool)
    rank = make_rank(tree, pool)
    req, other = request(positional_embed_overrides=PositionalEmbeds([torch.ones(4)], [1])), request()
    for each in (other, req):
        each.output_ids = adapter.rank.make_tokens([11, 12])
    slots = _Slots(rank, np.arange(41))
    row = slots.enter(req, pool.alloc(4).numpy(), 0, decodes)
    slots.upload()
    assert tree.total_size() == 0 and pool.available_size() == 40 - 4 * decodes
    assert row.tolist() == [1, 2, 3, 4]
    slots.enter(other, pool.alloc(4).numpy(), 0, decodes=False)
    assert len(host_tree.find_kv(rank, other)) == 4 and not len(host_tree.find_kv(rank, req))


def path(node) -> list:
    """The nodes from ``node`` up to the root."""
    return [] if node is None else [node, *path(node.parent)]


def test_which_degree_generated_which_tokens():
    req = request()
    degrees.begin(req, tp=1)
    speculation.begin(req)
    degrees.record_degree(req, tp=2)
    assert req.pat_degrees == ((0, 2),), "nothing was generated before"
    req.output_ids = adapter.rank.make_tokens([11, 12, 13])
    degrees.record_degree(req, tp=4)
    degrees.record_degree(req, tp=4)
    assert req.pat_degrees == ((0, 2), (3, 4))
    before = req.pat_degrees
    degrees.record_degree(req, tp=2)
    assert req.pat_degrees == ((0, 2),), "two switches with no token between them"
    req.pat_degrees = before
    req.output_ids.append(14)
    degrees.record_degree(req, tp=1)
    other = request()
    requests.restore_state(other, requests.serialize_request(req))
    assert other.pat_degrees == ((0, 2), (3, 4), (4, 1))


def test_who_was_retracted_takes_its_routed_experts_along():
    """An abort tells them to the client before it has KV again."""
    req, experts = request(), torch.arange(6).view(3, 1, 2)
    assert move_request(req).pat_experts is None
    req.pat_experts = experts
    assert torch.equal(move_request(req).pat_experts, experts)


def test_what_a_custom_logit_processor_has_counted_goes_along():
    req = request(custom_logit_processor="its code", custom=GIVEN_CUSTOM.copy())
    req.sampling_params.custom_params["seen"] = [7]
    other = move_request(req).sampling_params.custom_params
    assert other.keys() == {"budget", "seen", "__req__"} and (other["budget"], other["seen"]) == (4, [7])
    assert other["__req__"] is not req.sampling_params.custom_params["__req__"]


@pytest.mark.parametrize("grammar", [None, object()])
def test_of_an_aborted_request_whether_it_has_a_grammar(grammar):
    """An abort takes a waiting request away, and one that runs keeps its grammar: all ranks of the new group agree."""
    req = request()
    req.grammar, req.to_finish = grammar, object()
    assert requests.serialize_request(req).constrained == (grammar is not None)
