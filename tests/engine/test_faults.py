"""What goes wrong in a switch: before COMMIT the old layout goes on, a dead rank ends the engine cleanly.

Servers are those that the other tests have left, as each is dead afterwards.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading

import psutil
import pytest
import requests

from sglang_pat.launch.processes import wait_until_ended
from sglang_pat.rollout import client, http
from sglang_pat.testing.server import Server, find_rank_processes

from .conftest import fault, long, make_model
from .rollout_calls import admitter, prompts, schedule, wait_for_schedule
from .rollout_calls import tokens as tokens_of
from .streams import GREEDY, body, check_idle, hold, post, tokens
from .test_drafts import FLAGS as DRAFTS

BODIES = [body(i, 120) for i in range(4)]


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(("sglang_pat", "torch_"))}


@pytest.mark.parametrize("kind", [long("resident"), long("reshard"), "drafts", long("mixtral"), "mixtral reshard"])
@pytest.mark.parametrize(("state", "rank"), [long("PREPARE", 1), long("QUIESCE", 0), ("EXCHANGE", 1)])
async def test_failure_before_commit_leaves_the_old_layout(servers, session, llama, marker, kind, state, rank):
    """The fault is in the second of three switches; every request completes, unchanged."""
    of_kind = marker(100) if kind == "reshard" else llama
    model = make_model("mixtral") if "mixtral" in kind else of_kind
    flags = ("--pat-weights", "reshard") if "reshard" in kind else DRAFTS if kind == "drafts" else ()
    server = servers.adaptive(model, 2, *flags)
    expected = tokens(await server.generate_async(BODIES))
    work = await hold(server, session, BODIES, step=4)  # with drafts, of some twenty tokens
    assert (await server.reconfigure_async(session, 2))[0] == 200
    with fault(server, f"{state}:{rank}:raise"):
        code, said = await server.reconfigure_async(session, 1)
    assert code == 500 and f"rank {rank}" in said["error"]["message"], said
    assert server.status()["layout"] == {"tp": 2, "dp": 1}
    # It goes on where it was; after a lost exchange with a prefill.
    await server.set_schedule(session, {"batch": 10, "hold": True})
    await server.wait_for_schedule(session)
    assert (await server.reconfigure_async(session, 1))[0] == 200
    await server.set_schedule(session)
    answers = await asyncio.gather(*work)
    assert tokens(answers) == expected
    if kind == "drafts":
        assert sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in answers) > 100
    status = server.status()
    assert status["layout"] == {"tp": 1, "dp": 2}
    assert [bool(record["error"]) for record in status["switches"][-3:]] == [False, True, False]


async def test_a_control_request_that_does_not_get_its_layout_is_answered_and_all_goes_on(server, session):
    """Three attempts, then an error; a second attempt that succeeds has moved no KV.  Requests end unchanged."""
    expected = tokens(await server.generate_async(BODIES))
    asked = {"name": "model.norm.weight", "truncate_size": 2}
    work = await hold(server, session, BODIES)
    for failing in (True, False):
        assert (await server.reconfigure_async(session, 2))[0] == 200
        epoch = server.status()["switches"][-1]["epoch"]
        with fault(server, "PREPARE:1:raise" if failing else f"PREPARE:1:raise:{epoch + 1}"):
            code = await post(session, server, "/get_weights_by_name", asked)
        assert (code, server.status()["layout"]["tp"]) == ((400, 2) if failing else (200, 1))
        if failing:
            assert (await server.reconfigure_async(session, 1))[0] == 200
    await server.set_schedule(session)
    assert tokens(await asyncio.gather(*work)) == expected
    found = [(r["to_tp"], bool(r["error"]), r["reason"]) for r in server.status()["switches"][-7:]]
    lost, home = (1, True, "control"), (1, False, "control")
    assert found == [lost, lost, lost, (1, False, "request"), (2, False, "request"), lost, home]
    last = server.status()["switches"][-1]
    assert (last["migrated"], last["recomputed"], last["moved_bytes"]) == (0, len(BODIES), 0)


def segments(server: Server) -> set[str]:
    """Shared memory that the processes of ``server`` have mapped."""
    mapped = set()
    for process in server.list_children():
        try:
            mapped |= {os.path.basename(m.path) for m in process.memory_maps() if m.path.startswith("/dev/shm/")}
        except psutil.Error:
            continue
    return mapped


STATES = ["PREPARE", "QUIESCE", "EXCHANGE", "COMMIT", "RESUME"]


@pytest.mark.parametrize("killed", [*map(long, STATES[:-1]), STATES[-1], "coordinator"])
async def test_what_is_killed_ends_the_engine(servers, session, llama, killed):
    """A rank in a state of a switch, or the coordinator while all hold: an error to every waiting client, no process
    and no segment is left, and the exit code says that it failed."""
    server = servers.victim(llama)
    children, mine = server.list_children(), segments(server)
    (coordinator,) = [p for p in children if p.cmdline() and p.cmdline()[0].startswith("sglang_pat::coordinator")]
    work = await hold(server, session, BODIES)
    if killed == "coordinator":
        coordinator.kill()
        results = await asyncio.gather(*work, return_exceptions=True)
    else:
        with fault(server, f"{killed}:1:kill"):
            results = await asyncio.gather(*work, server.reconfigure_async(session, 2), return_exceptions=True)
    check_ended(server, children, mine, results)


def check_ended(server: Server, children: list[psutil.Process], mine: set[str], results: list) -> None:
    """``children`` and ``mine``: its processes and segments; ``results``: what its clients got."""
    assert all(isinstance(result, Exception) for result in results), results
    alive = wait_until_ended(children, 500)
    assert not alive, [process.cmdline() for process in alive]
    assert server.process.wait(timeout=500) != 0
    with pytest.raises(requests.ConnectionError):
        server.get("/health")
    assert not mine & shared_memory()
    server.stop()


@pytest.mark.parametrize("when", ["generation", long("EXCHANGE")])
def test_a_round_outlives_one_of_its_two_servers(servers, server, llama, monkeypatch, when):
    """Greedy: the same tokens as of one server; what was generated is not generated again."""
    monkeypatch.setattr(client, "PART_TOKENS", 8)
    kept = []
    make = http.HttpBackend._make_lost_error
    monkeypatch.setattr(http.HttpBackend, "_make_lost_error", lambda *a: kept.append(error := make(*a)) or error)
    dying = servers.adaptive(llama, 2, "--enable-metrics", "--random-seed", "7")
    servers.give_away(dying)
    children, mine = dying.list_children(), segments(dying)
    greedy = GREEDY | {"max_new_tokens": 60}
    wanted = server.generate([prompt | {"sampling_params": greedy} for _, prompt in prompts(*range(4))])
    schedule(server, {"arrived": 4})  # ends none of its responses before: it would be given more than half of all
    schedule(dying, {"arrived": 4}, {"step": 30, "hold": True})
    groups: list = []
    both = client.RolloutClient([server.url, dying.url])
    admitted = admitter(*range(4), num_prompts=4, eta_prompts=1.0)
    work = threading.Thread(target=lambda: groups.extend(both.rollout(admitted, greedy, version=0)))
    work.start()
    wait_for_schedule(dying)
    if when == "generation":
        find_rank_processes(children)[1].kill()
    else:
        with fault(dying, f"{when}:0:kill"), pytest.raises(requests.ConnectionError):
            dying.reconfigure(tp=2)
    work.join()
    *groups, summary = groups
    assert summary.returned == 4
    assert tokens_of(groups) == {(i, n): answer["output_ids"] for i, answer in enumerate(wanted) for n in range(2)}
    assert len(kept) == 4 and all(len(error.output.token_ids) >= 16 for error in kept)
    check_idle(server)
    check_ended(dying, children, mine, [])


KILLS = [
    long("lend", "EXCHANGE", 1),
    long("take back", "PREPARE", 1),
    ("take back", "COMMIT", 0),
    long("merge", "QUIESCE", 3),
    ("lent", "", 3),
    *(pytest.param("drawn", "", seed, marks=pytest.mark.soak) for seed in range(200)),
]


@pytest.mark.parametrize(("when", "state", "rank"), KILLS)
async def test_what_is_killed_while_ranks_are_lent_ends_the_engine(servers, session, llama, when, state, rank):
    """A rank in a switch that lends ranks, takes them back, or is of those that work; or a lent rank, at rest."""
    if when == "drawn":
        rng = random.Random(rank)
        when, state, rank = rng.choice(["lend", "take back", "merge", "lent"]), rng.choice(STATES), rng.randrange(4)
    server = servers.adaptive(llama, 4)
    servers.give_away(server)
    children, mine = server.list_children(), segments(server)
    work = await hold(server, session, BODIES)
    if when != "lend":
        assert await post(session, server, "/pat/lend_ranks") == 200
    if when == "lent":
        find_rank_processes(children)[rank].kill()
        results = await asyncio.gather(*work, return_exceptions=True)
    else:
        with fault(server, f"{state}:{rank}:kill"):
            paths = {"lend": "/pat/lend_ranks", "take back": "/pat/take_back_ranks", "merge": "/pat/reconfigure"}
            asked = post(session, server, paths[when], {"tp": 2} if when == "merge" else None)
            results = await asyncio.gather(*work, asked, return_exceptions=True)
    check_ended(server, children, mine, results)
