"""A cramped server: requests queue, and long prompts are prefilled in pieces."""

from __future__ import annotations

import asyncio

import pytest

from sglang_pat.testing.server import Server

from .features import REGEX
from .stock_answers import check_logprobs, known
from .streams import UP_AND_DOWN, Stream, body, open_session, post, prompt, read, up_and_down

CRAMPED = ("--max-running-requests", "3", "--chunked-prefill-size", "64")


@pytest.fixture
def cramped(servers, llama) -> Server:
    return servers.adaptive(llama, 2, *CRAMPED)


QUEUED = known(*(body(121 + i, tokens=260 + 10 * i) for i in range(14)))


def test_queued_requests(cramped, stock):
    """14 requests on two replicas that take three each: the others wait through all switches."""

    async def run():
        async with cramped.session() as session:
            await cramped.arm(session, *up_and_down(arrived=len(QUEUED)))
            work = asyncio.ensure_future(cramped.generate_async(QUEUED))
            for record in (await cramped.reached(session))["switches"]:
                assert record["requests"] == len(QUEUED)
                assert record["migrated"] <= 6, "the others wait"
            return await work

    stock.check(asyncio.run(run()), QUEUED)


OVER = known(
    *(body(161 + i, tokens=240, frequency_penalty=0.4) for i in range(3)),
    *(body(164 + i, tokens=240, return_logprob=True, top_logprobs_num=2) for i in range(3)),
    *(body(167 + i, tokens=240, regex=REGEX, ignore_eos=False) for i in range(2)),
)


def test_more_requests_than_a_merged_replica_decodes_at_once(cramped, stock):
    """Six decode, three of them after a merge: the others wait with their KV, and bring it to the split after it."""

    async def run():
        async with cramped.session() as session:
            await cramped.arm(session, *up_and_down(arrived=len(OVER)))
            work = asyncio.ensure_future(cramped.generate_async(OVER))
            records = (await cramped.reached(session))["switches"]
            merge, split, *_ = records
            assert (merge["migrated"], merge["parked"]) == (3, 3)
            assert split["migrated"] > 3, "some that were parked go on in the replica that has a place for them"
            for record in records:
                assert not record["error"] and not record["recomputed"] and not record["recomputed_tokens"]
                assert record["migrated"] + record["parked"] >= 6, "all that have decoded keep their KV"
            return await work

    stock.check(asyncio.run(run()), OVER)


SIX = known(*(body(170 + i, tokens=150, rid=f"waits-{i}x", return_logprob=True) for i in range(6)))
STEPS_MADE = 37
"""No multiple of the fifty tokens that SGLang sends at a time."""


@pytest.mark.parametrize("merged", [True, False])
def test_who_is_aborted_while_it_waits_gives_back_all_its_tokens(cramped, stock, merged):
    """After a merge three have no place; in a pause that retracts, nobody has one."""
    streams, waited = [Stream() for _ in SIX], 3 if merged else len(SIX)

    async def one(session, request, stream, streamed):
        if streamed:
            await read(cramped, session, request, stream)
        else:
            stream.chunks.append(await cramped.one(session, request))
        stream.done = True

    async def run():
        async with open_session() as session:
            point = {"arrived": len(SIX), "step": STEPS_MADE, "hold": True} | ({"tp": 2} if merged else {})
            await cramped.arm(session, point)
            tasks = [
                asyncio.ensure_future(one(session, request, stream, i % 2))
                for i, (request, stream) in enumerate(zip(SIX, streams, strict=True))
            ]
            state = await cramped.reached(session)
            if merged:
                assert [record["parked"] for record in state["switches"]] == [3]
            else:
                assert await post(session, cramped, "/pause_generation", {"mode": "retract"}) == 200
            for i in range(2):
                assert await post(session, cramped, "/abort_request", {"rid": SIX[i]["rid"]}) == 200
                assert await post(session, cramped, "/abort_request", {"rid": SIX[-1 - i]["rid"]}) == 200
            assert await post(session, cramped, "/abort_request", {"abort_all": True}) == 200
            left = set(tasks)
            while len(left) > len(SIX) - waited:  # though nothing goes on
                left -= (await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED))[0]
            if not merged:
                assert await post(session, cramped, "/continue_generation", {}) == 200
            await cramped.arm(session)
            await asyncio.gather(*tasks)

    asyncio.run(run())
    assert sorted(stream.tokens for stream in streams) == [STEPS_MADE + 1] * waited + [STEPS_MADE + 2] * (6 - waited)
    for stream, wanted in zip(streams, stock.of(SIX), strict=True):
        tokens, meta = stream.answer["output_ids"], stream.answer["meta_info"]
        assert tokens == wanted["output_ids"][: len(tokens)] and meta["completion_tokens"] == len(tokens)
        assert meta["finish_reason"]["type"] == "abort" and meta["prompt_tokens"] == 20
        assert [token for _, token, _ in meta["output_token_logprobs"]] == tokens
        degrees = [1] if len(tokens) == STEPS_MADE + 1 else [1, 2]
        assert [tp for _, tp in meta["tp_from_token"]] == degrees and "cached_tokens" in meta


LOGPROBS = dict(return_logprob=True, logprob_start_len=0, top_logprobs_num=1)
CHUNKED = known(*(body(141 + i, tokens=40, **LOGPROBS) | {"input_ids": prompt(141 + i, 600)} for i in range(6)))


def test_switch_in_the_middle_of_a_chunked_prefill(cramped, stock):
    async def run():
        async with cramped.session() as session:
            # A prompt takes ten steps.
            entries = [{"tp": tp, "arrived": 6, "batch": 5 + 13 * i} for i, tp in enumerate(UP_AND_DOWN)]
            await cramped.arm(session, *entries)
            work = asyncio.ensure_future(cramped.generate_async(CHUNKED))
            switches = (await cramped.reached(session))["switches"]
            assert all(record["requests"] > record["migrated"] for record in switches), "nobody was being prefilled"
            return await work

    answers = asyncio.run(run())
    for answer, wanted, request in zip(answers, stock.of(CHUNKED), CHUNKED, strict=True):
        assert answer["meta_info"]["cached_tokens"] == 0
        if stock.same(answer, wanted, request):
            check_logprobs(answer["meta_info"], wanted["meta_info"])
