"""Bounds of ``/pat/*``, and who may call what."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec import convert

pytestmark = pytest.mark.contract

API_KEY, ADMIN_KEY = "api-secret", "admin-secret"

REGISTER = (Path(__file__).parents[2] / "docs" / "sglang.md").read_text()
ROUTES = {
    (path, method): who
    for method, path, who in re.findall(r"^\| `(\w+) (/pat/\S+)` \| (\w+) \|", REGISTER, re.MULTILINE)
}


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
    assert set(found) == set(ROUTES), "say in docs/sglang.md who may call it"
    caller = client(app, **keys)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    for path, method in found:
        answer = caller.request(method, path, headers=headers)
        allowed = as_admin if ROUTES[path, method] == "administrator" else as_user
        assert (answer.status_code != 401) == allowed, (path, method, answer)


@pytest.mark.parametrize("path", [path for path, method in sorted(ROUTES) if method == "POST"])
def test_bodies_are_bounded(app, path, monkeypatch):
    from sglang_pat.server import http

    monkeypatch.setattr(http, "MAX_BYTES", 1000)
    monkeypatch.setattr(http, "get_manager", lambda: None)
    answer = client(app).post(path, content=(b"[" * 100 for _ in range(100)))
    assert answer.status_code == 400
    assert "longer than 1000 bytes" in answer.json()["error"]["message"]


BAD_BODIES = (
    b"", b"\xff\xfe\x00", b"[2]", b"{}", b'{"tp": "2"}', b'{"tp": true}', b'{"tp": -2}', b'{"tp": 2.0}',
    b'{"tp": 1e999}', b'{"tp": 2, "dry_run": 1}', b'{"tp": 2, "dp": 1}', b'{"tp": ' + b"9" * 5000 + b"}", b"[" * 30_000,
)  # fmt: skip


@pytest.mark.parametrize("body", BAD_BODIES, ids=lambda body: str(body[:40]))
def test_what_is_no_switch_is_told_what_to_send(app, body):
    answer = client(app).post("/pat/reconfigure", content=body)
    assert answer.status_code == 400 and 'send {"tp": 2}' in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ({}, None),
        ({"requests": 64, "prompts": 8, "prompt_tokens": 500, "max_new_tokens": 4096, "name": "mine"}, None),
        ({"kind": "long", "prompt_tokens": None}, None),
        ({"lease_seconds": 60.0}, None),
        ({"lease_seconds": 0}, "lease_seconds is 0: expected float >= 1"),
        ({"requests": 0}, "requests is 0: expected int >= 1"),
        ({"requests": 10**9}, "requests is 1000000000: expected int <= 65536"),
        ({"requests": 4, "prompts": 5}, "prompts is 5, of 4 requests: give at most as many"),
        ({"prompts": 5}, "prompts is 5, and requests is not given: give it, too"),
        ({"samples": 4}, "object contains unknown field samples"),
        ({"name": "a b"}, 'name is "a b": expected str matching regex'),
        ({"kind": "a b"}, 'kind is "a b": expected str matching regex'),
        ({"name": "a\n"}, 'name is "a\\n": expected str matching regex'),
        ({"kind": "a\n"}, 'kind is "a\\n": expected str matching regex'),
        ([], "expected object, got array"),
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
    manager.server_args = SimpleNamespace(spec=SimpleNamespace(config=config), enable_return_routed_experts=True)
    manager.auto_create_handle_loop = lambda: None
    manager.pat_get_weight_version = lambda: "step-3"
    manager.pat_weight_updates, manager.context_len, manager.max_req_input_len, manager.tokenizer = 3, 100, 90, None
    manager.model_config = SimpleNamespace(hf_eos_token_id={2})
    manager.send_to_scheduler = SimpleNamespace(send_pyobj=sent.append)
    monkeypatch.setattr(http, "get_manager", lambda: manager)
    caller = client(app)
    answer = caller.post("/pat/round", json=body)
    if line is None:
        about = {"weight_updates": 3, "room": 90, "stop_token_ids": [2], "routed_experts": True}
        assert answer.json() == about | {"weight_version": "step-3"}
        assert sent == [BeginRound(**{"lease_seconds": 600.0} | body)]
        assert caller.delete("/pat/round", params={"name": "mine"}).status_code == 200
        assert sent[1:] == [EndRound(name="mine")]
    else:
        said = answer.json()["error"]["message"]
        assert answer.status_code == 400 and line in said and "\n" not in said and not sent


TRAINING = {"samples": 4, "complete": 1, "ready": 30, "seconds_per_token": 1e-3}
OTHERS = {"engines": 1, "running": 4, "waiting": 0, "tokens": 900, "room": 9000}


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (TRAINING, "asked"),
        ({"samples": 4, "complete": 1, "ready": 30}, "object missing required field seconds_per_token"),
        ({"samples": 0, "complete": 0, "ready": 0, "seconds_per_token": 1}, "samples is 0: expected int >= 1"),
        (
            {"samples": 4, "complete": 5, "ready": 0, "seconds_per_token": 1},
            "complete is 5, of 4 samples: give at most",
        ),
        ({"samples": 4, "complete": 1, "ready": 30, "pace": 1}, "object contains unknown field pace"),
        (TRAINING | {"others": OTHERS}, "asked"),
        (TRAINING | {"others": OTHERS | {"engines": 0}}, "others.engines is 0: expected int >= 1"),
        ({"client": "a\n"}, 'client is "a\\n": expected str matching regex'),
    ],
    ids=str,
)
def test_lending_is_asked_with_what_can_be(app, monkeypatch, body, line):
    from sglang_pat.policies.lending import Training
    from sglang_pat.server import http

    async def decide(training, client):
        assert (training, client) == (convert(body, Training), "default")
        return {"move": "asked"}

    monkeypatch.setattr(http, "get_manager", lambda: SimpleNamespace(pat_decide_lending=decide))
    answer = client(app).post("/pat/lending", json=body)
    said = answer.json()["error"]["message"] if "error" in answer.json() else answer.json()["move"]
    assert line in said and "\n" not in said and answer.status_code == (200 if line == "asked" else 400)


@pytest.mark.parametrize(
    ("path", "body", "asked"),
    [
        ("lend_ranks", None, (2, "default", 600.0)),
        ("lend_ranks", {"stride": 4, "client": "mine", "lease_seconds": 5}, (4, "mine", 5.0)),
        ("lend_ranks", {"stride": 1}, "stride is 1: expected int >= 2"),
        ("lend_ranks", {"ranks": 2}, "object contains unknown field ranks"),
        ("lend_ranks", {"lease_seconds": 0}, "lease_seconds is 0: expected float >= 1"),
        ("lend_ranks", {"lease_seconds": 1e9}, "expected float <= 86400.0"),
        ("lend_ranks", {"client": "a\n"}, 'client is "a\\n": expected str matching regex'),
        ("take_back_ranks", None, (1, "default")),
        ("take_back_ranks", {"client": "mine"}, (1, "mine")),
        ("take_back_ranks", {"stride": 1}, "object contains unknown field stride"),
    ],
    ids=str,
)
def test_ranks_are_lent_to_a_client_for_a_time(app, monkeypatch, path, body, asked):
    from sglang_pat.server import http

    async def lend(*given):
        return {"given": given}

    monkeypatch.setattr(http, "get_manager", lambda: SimpleNamespace(pat_lend_ranks=lend))
    answer = client(app).post(f"/pat/{path}", json=body) if body else client(app).post(f"/pat/{path}")
    if isinstance(asked, str):
        assert answer.status_code == 400 and asked in answer.json()["error"]["message"]
    else:
        assert tuple(answer.json()["given"]) == asked
