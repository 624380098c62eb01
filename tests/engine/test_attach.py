"""SGLang's own launchers with ``SGLANG_PAT`` set: the engine switches, and its clients see one of all ranks."""

from __future__ import annotations

import pytest

from sglang_pat.host.adapter import FOLDER

from . import called
from .conftest import long
from .streams import body, through, tokens

BODIES = [body(i, 120) for i in range(4)]


def test_nothing_is_adaptive_without_the_variable(servers, llama):
    server = servers.stock(llama)
    assert server.get("/pat/status").status_code == 404
    assert server.generate(BODIES[:1])[0]["meta_info"]["completion_tokens"] == 120


PATCHED = {"become_adaptive", "make_private_ports"} | ({"remember"} if FOLDER == "v0_5_12" else set())
"""Functions of ours that SGLang calls in place of its own, and would not miss."""


# launch_server without --adaptive-tp is SGLang's launcher, with its own arguments.
@pytest.mark.parametrize("module", [called.__name__, long("tests.engine.spawned")], ids=["command", "spawned function"])
def test_a_stock_launcher_switches(module, servers, llama, tmp_path):
    env = {"SGLANG_PAT": "base_tp=1,policy=schedule", called.ENV: str(tmp_path / "functions")}
    server = servers.get(llama, "--tp", "2", env=env, module=module)

    def told() -> dict[str, int]:
        info = server.get("/server_info").json()
        return {name: info[name] for name in ("tp_size", "dp_size", "max_total_num_tokens")}

    before = told()
    assert (before["tp_size"], before["dp_size"]) == (2, 1)
    assert server.status()["layout"] == {"tp": 1, "dp": 2}
    expected = tokens(server.generate(BODIES))
    assert tokens(through(server, BODIES, {20: 2, 60: 1, 90: 2})[0]) == expected
    assert server.status()["layout"] == {"tp": 2, "dp": 1}
    assert told() == before
    if module == called.__name__:
        assert PATCHED <= {function.name.rpartition(".")[2] for function in called.read(tmp_path / "functions")}
