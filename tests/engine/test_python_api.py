"""The command without ``--adaptive-tp``, the Python API with its rounds, and a server without a tokenizer."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

import aiohttp
import pytest

from .conftest import FORGETS_RETRACTIONS
from .rollout_calls import admitter, run_round, schedule, tokens, wait_for_schedule
from .streams import GREEDY, body, check_idle

# -- without --adaptive-tp ----------------------------------------------------------------------------------------


def python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=500)


def test_without_the_flag_nothing_of_the_engine_is_imported(llama):
    """Nor by SGLang, of our plug-in: ``tests/contract/test_attach.py``."""
    code = """
import json, runpy, sys
from sglang_pat import launch_server

runpy.run_module = lambda name, **_: print(json.dumps([name, sys.argv[1:], list(sys.modules)]))
launch_server.main(["--model-path", sys.argv[1], "--tp", "1"])
"""
    name, argv, modules = json.loads(python("-c", code, str(llama)).stdout.splitlines()[-1])
    assert name == "sglang.launch_server" and argv == ["--model-path", str(llama), "--tp", "1"]
    launcher = {"config", "layout", "version", "launch_server", "plugin", "cpu", "cpu.shim", "launch"}
    launcher |= {"launch.processes"}
    ours = {module for module in modules if module.startswith("sglang_pat")}
    assert ours <= {"sglang_pat"} | {f"sglang_pat.{name}" for name in launcher}


@pytest.mark.parametrize("flags", [("--pat-policy", "manual"), ("--pat-switch-at=4",)])
def test_stray_flags_are_refused_with_one_line(llama, flags):
    result = python("-m", "sglang_pat.launch_server", "--model-path", str(llama), *flags)
    assert result.returncode != 0
    (line,) = result.stderr.splitlines()
    assert "--adaptive-tp" in line and flags[0] in line


# -- the Python API -----------------------------------------------------------------------------------------------

SAMPLINGS = [GREEDY | {"max_new_tokens": 60}, GREEDY | {"max_new_tokens": 60, "frequency_penalty": 0.7}]


def test_an_engine_in_python(server, servers, llama):
    """``python_case.py``, whose last round loses a rank.  Its rounds and a client's have the same texts: greedy
    (SGLang's seeds are for one layout only), the client's through switches."""
    found = servers.run("tests.engine.python_case", str(llama), json.dumps(SAMPLINGS), seconds=500)
    lines = found.stdout.splitlines()
    assert lines[-1:] == ["killed"] and found.returncode == 1, found.stdout + found.stderr[-9000:]
    for sampling, line in zip(SAMPLINGS, lines[:-1], strict=True):
        schedule(server, {"tp": 2, "arrived": 6, "step": 10}, {"tp": 1, "step": 40})
        groups, _ = run_round(server, admitter(0, 1, 2, eta_prompts=1.0), sampling)
        assert len(wait_for_schedule(server)["switches"]) == 2
        assert sorted([*key, ids] for key, ids in tokens(groups).items()) == json.loads(line)
    check_idle(server)


@pytest.mark.long
def test_the_round_after_a_crowded_one_of_its_kind_starts_in_twice_the_degree(servers, llama, tmp_path):
    """Short rounds have no room for their KV, the long one between them has: ``crowded_case.py``."""
    words = "tests.engine.crowded_case", str(llama), str(tmp_path / "log")
    found = servers.run(*words, env=FORGETS_RETRACTIONS, seconds=500)
    rounds = [json.loads(line) for line in found.stdout.splitlines()]
    assert [(kind, start) for kind, _, start, _ in rounds] == [("short", 1), ("long", 1), ("short", 2)], found.stderr
    assert rounds[0][1] >= 4 and rounds[1][1] == 0
    assert rounds[0][3] == [1] and rounds[2][3] == [2]


# -- without a tokenizer: tokens come straight from the ranks, in order all the same -----------------------------


@pytest.mark.long
def test_no_tokenizer(servers, llama):
    server = servers.adaptive(llama, 2, "--skip-tokenizer-init")
    stock = servers.stock(llama)
    bodies = [body(seed, 120) for seed in range(4)]

    async def stream(session: aiohttp.ClientSession, request: dict[str, Any]) -> list[list[int]]:
        return [chunk["output_ids"] async for chunk in server.stream(session, request)]

    async def run() -> list[list[list[int]]]:
        async with server.session() as session:
            switches = ({"tp": tp, "arrived": 4, "step": step} for tp, step in ((2, 20), (1, 50), (2, 80)))
            await server.set_schedule(session, *switches)
            return await asyncio.gather(*(stream(session, request) for request in bodies))

    for chunks, expected in zip(asyncio.run(run()), stock.generate(bodies), strict=True):
        assert chunks[-1] == expected["output_ids"]
        assert all(later[: len(chunk)] == chunk for chunk, later in zip(chunks, chunks[1:], strict=False))
