"""Who may ask for ``/pat/*``: SGLang's key rules on our routes, with no engine behind them."""

from __future__ import annotations

import types

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sglang.srt.utils.auth import add_api_key_middleware

from sglang_pat.server import http

pytestmark = pytest.mark.contract

API_KEY, ADMIN_KEY = "api-secret", "admin-secret"


@pytest.mark.parametrize("keys, as_user, as_admin", [((API_KEY, None), 200, 200), ((None, ADMIN_KEY), 200, 401)])
def test_one_key_only(monkeypatch, keys, as_user, as_admin):
    """Both keys together: ``tests/engine/test_threshold.py``."""
    app = FastAPI()
    http.add_routes(app)

    async def answer(*_):
        return {}

    manager = types.SimpleNamespace(pat_status=answer, pat_reconfigure=answer)
    monkeypatch.setattr(http, "_manager", lambda: manager)
    add_api_key_middleware(app, api_key=keys[0], admin_api_key=keys[1])
    client = TestClient(app)
    bearer = {"Authorization": f"Bearer {API_KEY}"}
    assert client.get("/pat/status", headers=bearer).status_code == as_user
    assert client.get("/pat/status").status_code == (401 if keys[0] else 200)
    assert client.post("/pat/reconfigure", headers=bearer, json={"tp": 1}).status_code == as_admin
    assert client.post("/pat/reconfigure", json={"tp": 1}).status_code == 401
    if keys[1]:
        as_admin = {"Authorization": f"Bearer {ADMIN_KEY}"}
        assert client.post("/pat/reconfigure", headers=as_admin, json={"tp": 1}).status_code == 200
