"""Capsules: what of a request of SGLang's goes over, and how."""

from __future__ import annotations

import math
import pickle
import random
from array import array
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_pat.sglang.rank import degrees
from sglang_pat.sglang.switch import requests
from sglang_pat.sglang.switch.adopt import _Slots
from sglang_pat.switch.packing import Packed

pytestmark = pytest.mark.contract


def request(rid: str = "r", prompt: tuple[int, ...] = (5, 6, 7), **options) -> Req:
    made = Req(rid, "", list(prompt), SamplingParams(), return_logprob=True, **options)
    made.pat_request = SimpleNamespace(input_ids=made.origin_input_ids)
    made.pat_prompt, made.pat_sealed = array("I", prompt), None
    degrees.begin(made, tp=1)
    return made


def test_logprobs_go_over_as_arrays_and_come_out_as_they_were():
    req = request(top_logprobs_num=2)
    req.output_ids = [11, 12, 13]
    req.input_token_logprobs_val, req.input_token_logprobs_idx = [None, -0.25, -1e-40], [5, 6, 7]
    req.input_top_logprobs_val, req.input_top_logprobs_idx = [None, [-0.1, -0.2], []], [None, [1, 2], []]
    req.output_token_logprobs_val, req.output_token_logprobs_idx = [-0.5, -math.inf, -0.1], [11, 12, 13]
    req.output_top_logprobs_val, req.output_top_logprobs_idx = [[-0.5, -1.5]] * 3, [[11, 3], [12, 4], [13, 5]]
    req.output_token_ids_logprobs_val, req.output_token_ids_logprobs_idx = [[-2.0]] * 3, [[9]] * 3
    before = {name: pickle.dumps(getattr(req, name, None)) for name in requests.LOGPROBS}
    capsule = pickle.loads(pickle.dumps(requests.capture(req)))
    packed = {name for name, value in capsule.state.items() if isinstance(value, Packed)}
    assert packed == {name for name in requests.LOGPROBS if getattr(req, name, None)}
    other = request(top_logprobs_num=2)
    requests.restore(other, capsule)
    for name in requests.LOGPROBS:
        mine, theirs = getattr(req, name, None), getattr(other, name, None)
        assert repr(mine) == repr(theirs), name
        assert pickle.dumps(mine) == before[name], "the request itself is as it was"
    assert other.output_ids == [11, 12, 13]


@pytest.mark.parametrize("seed", range(20))
def test_what_a_switch_brings_is_found_in_the_tree(seed):
    """Requests of two groups, some with a common prefix: each finds its KV there, and no slot is lost.  What decodes
    holds its part of the tree, what waits for a decode slot does not."""
    rng = random.Random(seed)
    pool = TokenToKVPoolAllocator(400, torch.float32, "cpu", None, False)
    tree = RadixCache.create_simulated(mock_allocator=pool)
    slots = _Slots(SimpleNamespace(tree_cache=tree, token_to_kv_pool_allocator=pool, device="cpu"), np.arange(401))
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
            req.output_ids = [*tokens[1:], 3]  # the last token has no KV yet
            decodes = rng.random() < 0.5
            found = slots.enter(req, row.numpy(), shared, decodes)
            assert content[found].tolist() == tokens
            entered.append(tokens)
            decoding += [req] * decodes
    slots.upload()
    for tokens in entered:
        found = tree.match_prefix(MatchPrefixParams(key=RadixKey([*tokens, 3]))).device_indices
        assert content[found].tolist() == tokens
    assert pool.available_size() + tree.total_size() == 400
    held = {node for req in decoding for node in path(req.last_node)}
    assert tree.protected_size() == sum(len(node.key) for node in held if node is not tree.root_node)
    for req in decoding:
        tree.dec_lock_ref(req.last_node)
    assert tree.total_size() == tree.evictable_size(), "what decodes may take its room"


def path(node) -> list:
    """From ``node`` up to the root."""
    return [] if node is None else [node, *path(node.parent)]


def test_which_degree_generated_which_tokens():
    req = request()
    degrees.begin(req, tp=1)
    degrees.adopted(req, tp=2)
    assert req.pat_degrees == ((0, 2),), "nothing was generated before"
    req.output_ids = [11, 12, 13]
    degrees.adopted(req, tp=4)
    degrees.adopted(req, tp=4)
    assert req.pat_degrees == ((0, 2), (3, 4))
    before = req.pat_degrees
    degrees.adopted(req, tp=2)
    assert req.pat_degrees == ((0, 2),), "two switches with no token between them"
    req.pat_degrees = before
    req.output_ids.append(14)
    degrees.adopted(req, tp=1)
    other = request()
    requests.restore(other, requests.capture(req))
    assert other.pat_degrees == ((0, 2), (3, 4), (4, 1))
