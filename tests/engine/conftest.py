"""Servers shared by the engine tests: starting one takes 13-30 s, so few are started and kept."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest
from made_up import fingerprint

from sglang_pat.predict.profile import Fingerprint
from sglang_pat.testing import models
from sglang_pat.testing.server import Server

MODELS = Path(__file__).resolve().parents[2] / ".cache" / "models"
KEEP = 6
"""Servers kept alive at once."""


def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.engine)


class Servers:
    """Starts servers on demand and keeps the last :data:`KEEP`."""

    def __init__(self) -> None:
        self._alive: OrderedDict[tuple, Server] = OrderedDict()

    def get(self, model: Path, *flags: str, **options) -> Server:
        key = (str(model), flags, repr(sorted(options.items())))
        server = self._alive.pop(key, None)
        if server is None or server.process.poll() is not None:
            while len(self._alive) >= KEEP:
                self._alive.popitem(last=False)[1].stop()
            server = Server(model, *flags, **options)
        self._alive[key] = server
        return server

    def adaptive(self, model: Path, dp: int = 2, *flags: str, **options) -> Server:
        """An adaptive server that switches on request only, in its base layout tp1."""
        server = self.get(
            model, "--tp", "1", "--dp", str(dp), "--adaptive-tp", "--pat-policy", "manual", *flags, **options
        )
        server.reconfigure(tp=1)
        return server

    def stock(self, model: Path, *flags: str, **options) -> Server:
        """Stock SGLang, tp 1."""
        return self.get(model, *flags, **options)

    def stop(self) -> None:
        for server in self._alive.values():
            server.stop()


@pytest.fixture(scope="session")
def servers():
    pool = Servers()
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def llama() -> Path:
    return models.make_random("llama", MODELS / "llama")


@pytest.fixture(scope="session")
def qwen2() -> Path:
    return models.make_random("qwen2", MODELS / "qwen2")


@pytest.fixture(scope="session")
def qwen3() -> Path:
    return models.make_random("qwen3", MODELS / "qwen3")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return models.make_smollm2(MODELS / "smollm2")


@pytest.fixture(scope="session")
def deployment(llama) -> Fingerprint:
    """Of ``llama`` on two ranks."""
    return fingerprint(llama)
