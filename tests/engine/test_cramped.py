"""A cramped server: requests queue, and long prompts are prefilled in pieces."""

from __future__ import annotations

import asyncio

import pytest

from sglang_pat.testing.server import Server

from .features import REGEX
from .stock_answers import check_logprobs, known
from .streams import UP_AND_DOWN, body, endless, prompt, up_and_down

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


def test_requests_aborted_while_they_wait_for_a_place(cramped):
    """A merge leaves three no place; what they have generated is their answer, with the degree of each token."""

    async def run():
        async with cramped.session() as session:
            await cramped.arm(session, {"tp": 2, "arrived": 6, "step": 110}, {"step": 1, "hold": True})
            work = asyncio.ensure_future(cramped.generate_async([endless(181 + i) for i in range(6)]))
            (record,) = (await cramped.reached(session))["switches"]
            assert (record["migrated"], record["parked"]) == (3, 3)
            async with session.post(cramped.url + "/abort_request", json={"abort_all": True}) as response:
                assert response.status == 200
            await cramped.arm(session)
            return await work

    answers = [answer["meta_info"] for answer in asyncio.run(run())]
    assert {meta["finish_reason"]["type"] for meta in answers} == {"abort"}
    waited = [meta for meta in answers if meta["finish_reason"].get("message") == "Abort in waiting queue"]
    assert len(waited) == 3
    for meta in waited:
        assert meta["completion_tokens"] >= 50 and meta["tp_from_token"] == [[0, 1]]
    for meta in answers:
        assert meta in waited or [tp for _, tp in meta["tp_from_token"]] == [1, 2]


LOGPROBS = dict(return_logprob=True, logprob_start_len=0, top_logprobs_num=1)
CHUNKED = known(*(body(141 + i, tokens=40, **LOGPROBS) | {"input_ids": prompt(141 + i, 600)} for i in range(6)))


def test_switch_in_the_middle_of_a_chunked_prefill(cramped, stock):
    async def run():
        async with cramped.session() as session:
            # A prompt takes ten steps, and one that is interrupted starts over.
            entries = [{"tp": tp, "arrived": 6, "batch": 5 + 13 * i} for i, tp in enumerate(UP_AND_DOWN)]
            await cramped.arm(session, *entries)
            work = asyncio.ensure_future(cramped.generate_async(CHUNKED))
            switches = (await cramped.reached(session))["switches"]
            assert all(record["requests"] > record["migrated"] for record in switches), "nobody was being prefilled"
            return await work

    answers = asyncio.run(run())
    for answer, wanted, request in zip(answers, stock.of(CHUNKED), CHUNKED, strict=True):
        assert 0 <= answer["meta_info"]["cached_tokens"] < 600
        if stock.same(answer, wanted, request):
            check_logprobs(answer["meta_info"], wanted["meta_info"])
