"""A cramped server: requests queue, and long prompts are prefilled in pieces."""

from __future__ import annotations

import asyncio

import pytest

from sglang_pat.testing.server import Server

from .features import REGEX
from .stock_answers import check_logprobs, known
from .streams import UP_AND_DOWN, Stream, body, post, prompt, read, through

CRAMPED = ("--max-running-requests", "3", "--chunked-prefill-size", "64")


@pytest.fixture
def cramped(servers, llama) -> Server:
    return servers.adaptive(llama, 2, *CRAMPED)


QUEUED = known(*(body(121 + i, tokens=160 + 10 * i) for i in range(14)))


@pytest.mark.long
def test_queued_requests(cramped, stock):
    """14 requests on two replicas that take three each: the others wait through all switches."""
    answers, records = through(cramped, QUEUED)
    for record in records:
        assert record["requests"] == len(QUEUED)
        assert record["migrated"] <= 6, "the others wait"
    stock.check(answers, QUEUED)


OVER = known(
    *(body(161 + i, tokens=160, frequency_penalty=0.4) for i in range(3)),
    *(body(164 + i, tokens=160, return_logprob=True, top_logprobs_num=2) for i in range(3)),
    *(body(167 + i, tokens=160, regex=REGEX, ignore_eos=False) for i in range(2)),
)


def test_more_requests_than_a_merged_replica_decodes_at_once(cramped, stock):
    """Six decode, three of them after a merge: the others wait with their KV, and bring it to the split after it."""
    answers, records = through(cramped, OVER)
    merge, split, *_ = records
    assert (merge["migrated"], merge["parked"]) == (3, 3)
    assert split["migrated"] > 3, "some that were parked go on in the replica that has a place for them"
    for record in records:
        assert not record["recomputed"] and not record["recomputed_tokens"]
        assert record["migrated"] + record["parked"] >= 6, "all that have decoded keep their KV"
    stock.check(answers, OVER)


SIX = known(*(body(170 + i, tokens=150, rid=f"waits-{i}x", return_logprob=True) for i in range(6)))
STEPS_MADE = 37
"""No multiple of the fifty tokens that SGLang sends at a time."""


@pytest.mark.parametrize("merged", [True, False])
async def test_who_is_aborted_while_it_waits_gives_back_all_its_tokens(cramped, session, stock, merged):
    """Three have no place after a merge; in a pause that retracts, nobody has one."""
    streams, waited = [Stream() for _ in SIX], 3 if merged else len(SIX)

    async def one(request, stream, streamed):
        if streamed:
            await read(cramped, session, request, stream)
        else:
            stream.chunks.append(await cramped.generate_one(session, request))

    point = {"arrived": len(SIX), "step": STEPS_MADE, "hold": True} | ({"tp": 2} if merged else {})
    await cramped.set_schedule(session, point)
    tasks = [asyncio.ensure_future(one(*pair, i % 2)) for i, pair in enumerate(zip(SIX, streams, strict=True))]
    state = await cramped.wait_for_schedule(session)
    if merged:
        assert [record["parked"] for record in state["switches"]] == [3]
    else:
        assert await post(session, cramped, "/pause_generation", {"mode": "retract"}) == 200
    for i in (0, 1, -1, -2):
        assert await post(session, cramped, "/abort_request", {"rid": SIX[i]["rid"]}) == 200
    assert await post(session, cramped, "/abort_request", {"abort_all": True}) == 200
    left = set(tasks)
    while len(left) > len(SIX) - waited:  # though nothing goes on
        left -= (await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED))[0]
    if not merged:
        assert await post(session, cramped, "/continue_generation", {}) == 200
    await cramped.set_schedule(session)
    await asyncio.gather(*tasks)
    assert sorted(stream.tokens for stream in streams) == [STEPS_MADE + 1] * waited + [STEPS_MADE + 2] * (6 - waited)
    for stream, wanted in zip(streams, stock.list_answers(SIX), strict=True):
        tokens, meta = stream.answer["output_ids"], stream.answer["meta_info"]
        assert tokens == wanted["output_ids"][: len(tokens)] and meta["completion_tokens"] == len(tokens)
        assert meta["finish_reason"]["type"] == "abort" and meta["prompt_tokens"] == 20
        assert [token for _, token, _ in meta["output_token_logprobs"]] == tokens
        degrees = [1] if len(tokens) == STEPS_MADE + 1 else [1, 2]
        assert [tp for _, tp in meta["tp_from_token"]] == degrees and "cached_tokens" in meta


LOGPROBS = dict(return_logprob=True, logprob_start_len=0, top_logprobs_num=1)
CHUNKED = known(*(body(141 + i, tokens=40, **LOGPROBS) | {"input_ids": prompt(141 + i, 600)} for i in range(6)))


def test_switch_in_the_middle_of_a_chunked_prefill(cramped, stock):
    """What is computed of a prompt goes over, and its logprobs."""
    # A prompt takes ten steps.  The second switch comes when one of two goes on, and the other waits with its pieces.
    answers, records = through(cramped, CHUNKED, dict(zip((5, 6, 20, 33), UP_AND_DOWN, strict=True)), at="batch")
    assert [record["parked"] for record in records[:2]] == [2, 2]
    for record in records:
        assert record["requests"] > record["migrated"], "nobody was being prefilled"
        assert not record["recomputed"], record
    for answer, wanted, request in zip(answers, stock.list_answers(CHUNKED), CHUNKED, strict=True):
        assert answer["meta_info"]["cached_tokens"] == 0
        if stock.same(answer, wanted, request):
            check_logprobs(answer["meta_info"], wanted["meta_info"])
