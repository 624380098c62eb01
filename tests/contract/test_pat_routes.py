"""Bounds of ``/pat/*``, and who may call what."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from .rollouts_world import Manager, call, read

pytestmark = pytest.mark.contract

API_KEY, ADMIN_KEY = "api-secret", "admin-secret"

CLIENTS = {
    ("/pat/status", "GET"), ("/pat/schedule", "GET"), ("/pat/rollout", "POST"), ("/pat/rollout/verdict", "POST"),
    ("/pat/rollout/prompts", "POST"), ("/pat/rollout/turn", "POST"), ("/pat/round", "POST"), ("/pat/round", "DELETE"),
}  # fmt: skip
ADMINS = {("/pat/reconfigure", "POST"), ("/pat/schedule", "POST"), ("/pat/rollout/{job}", "DELETE")}
"""Routes that change the engine for everybody, or destroy what is kept."""


@pytest.fixture
def app():
    from fastapi import FastAPI

    from sglang_pat.server.http import add_routes

    app = FastAPI()
    add_routes(app)
    return app


def client(app, **keys):
    from sglang.srt.utils.auth import add_api_key_middleware
    from starlette.testclient import TestClient

    add_api_key_middleware(app, **({"api_key": None, "admin_api_key": None} | keys))
    # What is behind the keys does not exist here: any answer but 401 means that the caller got through.
    return TestClient(app, raise_server_exceptions=False)


def routes(app):
    found = [(route.path, method) for route in app.routes for method in getattr(route, "methods", ())]
    return [(path, method) for path, method in found if path.startswith("/pat/")]


@pytest.mark.parametrize(
    ("keys", "key", "as_user", "as_admin"),
    [
        ({}, None, True, True),
        ({"api_key": API_KEY}, None, False, False),
        ({"api_key": API_KEY}, API_KEY, True, True),
        ({"admin_api_key": ADMIN_KEY}, None, True, False),
        ({"admin_api_key": ADMIN_KEY}, ADMIN_KEY, True, True),
        ({"api_key": API_KEY, "admin_api_key": ADMIN_KEY}, None, False, False),
        ({"api_key": API_KEY, "admin_api_key": ADMIN_KEY}, API_KEY, True, False),
        ({"api_key": API_KEY, "admin_api_key": ADMIN_KEY}, ADMIN_KEY, False, True),
    ],
    ids=str,
)
def test_who_may_call_what(app, keys, key, as_user, as_admin):
    found = routes(app)
    assert set(found) == ADMINS | CLIENTS, "a new route: say here who may call it"
    caller = client(app, **keys)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    for path, method in found:
        answer = caller.request(method, path.replace("{job}", "mine"), headers=headers)
        allowed = as_admin if (path, method) in ADMINS else as_user
        assert (answer.status_code != 401) == allowed, (path, method, answer)


def test_a_schedule_answers_at_its_end_only(app):
    answer = client(app).get("/pat/schedule?wait=false")
    assert answer.status_code == 400 and "GET /pat/status has the switches so far" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", [path for path, method in sorted(CLIENTS | ADMINS) if method == "POST"])
def test_bodies_are_bounded(app, path, monkeypatch):
    from sglang_pat.server import http

    monkeypatch.setattr(http, "MAX_BODY_BYTES", 1000)
    monkeypatch.setattr(http, "MAX_SMALL_BYTES", 1000)
    monkeypatch.setattr(http, "_manager", lambda: None)
    answer = client(app).post(path, content=(b"[" * 100 for _ in range(100)))
    assert answer.status_code == 400
    assert "longer than 1000 bytes" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ({}, None),
        ({"requests": 64, "prompts": 8, "prompt_tokens": 500, "max_new_tokens": 4096, "name": "mine"}, None),
        ({"requests": 0}, "requests is 0: expected int >= 1"),
        ({"requests": 10**9}, "requests is 1000000000: expected int <= 65536"),
        ({"requests": 4, "prompts": 5}, "prompts is 5, of 4 requests: give at most as many"),
        ({"prompts": 5}, "prompts is 5, and requests is not given: give it, too"),
        ({"samples": 4}, "object contains unknown field samples"),
        ({"name": "a b"}, 'name is "a b": expected str matching regex'),
        ([], "expected object, got array"),
        ({"requests": 4, "tp": 3}, "round: tp is gone: the policy chooses the degree in which a round starts"),
    ],
    ids=str,
)
def test_a_round_is_begun_with_what_can_be(app, monkeypatch, body, line):
    from sglang_pat.config import AdaptiveConfig
    from sglang_pat.layout import ParallelLayout
    from sglang_pat.messages import BeginRound, EndRound
    from sglang_pat.server import http
    from sglang_pat.server.tokenizer import AdaptiveTokenizerManager

    sent = []
    manager = object.__new__(AdaptiveTokenizerManager)
    config = AdaptiveConfig(base=ParallelLayout(1, 2))
    manager.server_args = SimpleNamespace(spec=SimpleNamespace(config=config))
    manager.auto_create_handle_loop = lambda: None
    manager.send_to_scheduler = SimpleNamespace(send_pyobj=sent.append)
    monkeypatch.setattr(http, "_manager", lambda: manager)
    caller = client(app)
    answer = caller.post("/pat/round", json=body)
    if line is None:
        assert answer.status_code == 200 and sent == [BeginRound(**body)]
        assert caller.delete("/pat/round", params={"name": "mine"}).status_code == 200
        assert sent[1:] == [EndRound(name="mine")]
    else:
        said = answer.json()["error"]["message"]
        assert answer.status_code == 400 and line in said and "\n" not in said and not sent


def test_a_round_is_bounded():
    from sglang_pat.server.bodies import MAX_ROUND_SAMPLES, parse

    assert parse(b'{"num_prompts": 512, "num_responses": 16}').started_prompts == 640
    for body in (b'{"num_prompts": 1, "num_responses": 262144}', b'{"num_prompts": 8192, "num_responses": 8}'):
        with pytest.raises(ValueError, match=f"at most {MAX_ROUND_SAMPLES} are allowed") as caught:
            parse(body)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("number", [2**53 + 1, -(2**53) - 1, 2**64 - 1, 10**30])
def test_numbers_are_those_of_json(number):
    """Beyond 64 bits the state of a job could not be written, and one more than the last version is computed."""
    from sglang_pat.server.bodies import parse, parse_verdict

    for field in ("version", "end_of_epoch"):
        with pytest.raises(ValueError, match=field):
            parse(b'{"num_prompts": 1, "num_responses": 1, "%s": %d}' % (field.encode(), number))
    with pytest.raises(ValueError, match="key"):
        parse(b'{"num_prompts": 1, "num_responses": 1, "prompts": [{"key": [0, %d], "text": "a"}]}' % number)
    with pytest.raises(ValueError, match="key"):
        parse_verdict(b'{"key": [%d, 0], "number": 0, "keep": true}' % number)


@pytest.fixture
def rollouts(tmp_path):
    from sglang_pat.server.rollout import Rollouts

    return Rollouts(None, tmp_path, None)


def add_job(rollouts, name: str, settled: bool = True, used: float | None = None) -> None:
    from sglang_pat.rollout.admitter import Admitter
    from sglang_pat.rollout.rules import Rules
    from sglang_pat.server.jobs import Job

    job = rollouts._jobs._jobs[name] = Job(Admitter(Rules(num_prompts=1, num_responses=1)))
    job.settled = settled
    job.used = job.used if used is None else used


def test_jobs_are_bounded(rollouts, monkeypatch):
    from sglang_pat.server import jobs

    monkeypatch.setattr(jobs, "MAX_JOBS", 3)
    for name in "abc":
        rollouts._jobs.make_room(name)
        add_job(rollouts, name)
    rollouts._jobs.make_room("a")
    with pytest.raises(ValueError, match="3 others; DELETE"):
        rollouts._jobs.make_room("d")
    asyncio.run(rollouts.forget("b"))
    rollouts._jobs.make_room("d")


@pytest.mark.parametrize("over", [True, False])
def test_a_round_that_is_over_is_waited_for(rollouts, over):
    """Whoever left it cannot know what is still being done; only one that goes on is refused."""
    from sglang_pat.server.jobs import Busy

    async def drop() -> None:
        add_job(rollouts, "left", settled=False)
        job = rollouts._jobs.get("left")

        async def settle() -> None:
            await asyncio.sleep(0)  # whoever does not wait is here first
            job.settled = True

        job.settling = asyncio.ensure_future(settle()) if over else None
        await rollouts.forget("left")

    if over:
        asyncio.run(drop())
        assert rollouts._jobs.get("left") is None
    else:
        with pytest.raises(Busy, match="'left' has a round under way"):
            asyncio.run(drop())


def test_jobs_expire_but_not_in_a_round(rollouts):
    from sglang_pat.server.jobs import JOB_SECONDS, time

    now = time.monotonic()
    add_job(rollouts, "old", used=now - JOB_SECONDS - 1)
    add_job(rollouts, "busy", settled=False, used=now - JOB_SECONDS - 1)
    add_job(rollouts, "young", used=now - JOB_SECONDS + 60)
    add_job(rollouts, "mine", used=now - JOB_SECONDS - 1)
    rollouts._jobs.make_room("mine")
    assert set(rollouts._jobs._jobs) == {"busy", "young", "mine"}


def test_files_of_jobs_are_bounded(rollouts, tmp_path, monkeypatch):
    from sglang_pat.server import jobs

    monkeypatch.setattr(jobs, "MAX_SAVED_JOBS", 2)
    for name in "ab":
        (tmp_path / f"{name}.json").write_text("{}")
    rollouts._jobs.make_room("a")
    with pytest.raises(ValueError, match="2 are kept"):
        rollouts._jobs.make_room("c")


def test_labels_are_bounded():
    from sglang_pat import metrics

    jobs = metrics.RolloutMetrics.__new__(metrics.RolloutMetrics)
    jobs._jobs = set()
    labels = {jobs._label(f"job{i}") for i in range(5 * metrics.MAX_JOB_LABELS)}
    assert len(labels) == metrics.MAX_JOB_LABELS + 1 and "other" in labels
    assert jobs._label("job0") == "job0"


def test_tokens_of_all_jobs_are_bounded(tmp_path, monkeypatch):
    """Each body is small enough; all that is kept of them is counted, and what has gone is not."""
    from sglang_pat.server import bodies, intake
    from sglang_pat.server.rollout import Rollouts

    monkeypatch.setattr(intake, "MAX_PROMPT_TOKENS", 24)
    refused = pytest.raises(ValueError, match="at most 24 together; give fewer, or drop a job")

    async def run():
        rollouts = Rollouts(Manager(), tmp_path, None)
        a, b = (call(0, 6, job=name) for name in "ab")  # 12 tokens each, of which a round returns 4
        await read(rollouts, a)
        assert rollouts._jobs.get("a").tokens == 8
        await read(rollouts, b)
        with refused as caught:
            await read(rollouts, call(6, 5, job="b"))
        assert "10 tokens, and 16 are there" in str(caught.value) and "\n" not in str(caught.value)
        with refused:
            await read(rollouts, call(0, 5, job="new"))
        assert rollouts._jobs.get("b").tokens == 8 and rollouts._jobs.get("new") is None

        # In a round, which waits for verdicts: what comes with the call, and what is fed.
        events = rollouts.events(call(6, 2, job="a", filter_groups=True))
        await anext(events)
        more = '{"job": "a", "prompts": [{"key": [0, 8], "input_ids": [%s]}]}'
        with refused:
            await rollouts.feed(bodies.parse_more((more % "3, 1, 1, 1, 1").encode()))
        assert await rollouts.feed(bodies.parse_more((more % "3, 1, 1, 1").encode()))
        assert rollouts._jobs.tokens_beside("b") == 16
        await events.aclose()
        await rollouts._over("a")
        assert rollouts._jobs.tokens_beside("b") == 16, "the round was taken back"

        with refused:
            await read(rollouts, call(6, 1, job="b"))
        await rollouts.forget("a")
        await read(rollouts, call(6, 1, job="b"))

    asyncio.run(run())
