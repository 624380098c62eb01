"""The command without ``--adaptive-tp``, the Python API, and a server without a tokenizer."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

import aiohttp
import pytest

from .conftest import count_start
from .controls import body

# -- without --adaptive-tp ----------------------------------------------------------------------------------------


def python(code: str, *argv: str, timeout: float = 180) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=timeout)


def test_without_the_flag_nothing_of_the_engine_is_imported(llama):
    code = """
import json, runpy, sys
from sglang_pat import launch_server

def run_module(name, **_):
    import sglang.launch_server, sglang.srt.entrypoints.http_server
    print(json.dumps([name, sys.argv[1:], [m for m in sys.modules if m.startswith("sglang_pat")]]))

runpy.run_module = run_module
launch_server.main(["--model-path", sys.argv[1], "--tp", "1"])
"""
    name, argv, modules = json.loads(python(code, str(llama)).stdout.splitlines()[-1])
    assert name == "sglang.launch_server" and argv == ["--model-path", str(llama), "--tp", "1"]
    launcher = {"config", "layout", "version", "launch_server", "plugin", "removed", "cpu", "cpu.shim", "launch"}
    launcher |= {f"launch.{name}" for name in ("processes", "folder")}
    assert set(modules) <= {"sglang_pat"} | {f"sglang_pat.{name}" for name in launcher}


@pytest.mark.parametrize("flags", [("--pat-policy", "manual"), ("--pat-switch-at=4",)])
def test_stray_flags_are_refused_with_one_line(llama, flags):
    command = [sys.executable, "-m", "sglang_pat.launch_server", "--model-path", str(llama), *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert result.returncode != 0
    (line,) = result.stderr.splitlines()
    assert "--adaptive-tp" in line and flags[0] in line


# -- the Python API -----------------------------------------------------------------------------------------------

SCRIPT = """
import asyncio, json, sys
import sglang_pat

def main(model):
    try:
        sglang_pat.Engine(model_path=model)
    except ValueError as error:
        refusal = str(error)
    engine = sglang_pat.Engine(
        model_path=model, tp_size=1, dp_size=2, adaptive_tp=True, pat_policy="schedule",
        dtype="float32", max_total_tokens=16384, random_seed=1, log_level="error",
    )
    params = {"temperature": 0, "max_new_tokens": 120, "ignore_eos": True}
    prompts = [[6 + i, 70, 80] for i in range(3)]
    base = engine.layout

    def schedule(*entries):
        return engine.tokenizer_manager.pat_set_schedule(list(entries))

    async def switching():
        await schedule({"arrived": 3}, {"tp": 2, "step": 20, "hold": True})
        work = asyncio.ensure_future(engine.async_generate(input_ids=prompts, sampling_params=params))
        await engine.tokenizer_manager.pat_schedule()
        records = [await engine.async_reconfigure(tp) for tp in (1, 2)]
        await schedule()
        return [answer["output_ids"] for answer in await work], [3] + [record["requests"] for record in records]

    # The first switch is that of the schedule.
    switched, moved = engine.loop.run_until_complete(switching())
    engine.loop.run_until_complete(schedule())
    plain = [answer["output_ids"] for answer in engine.generate(input_ids=prompts, sampling_params=params)]

    def prefilled(prompts):
        engine.trace()
        answers = engine.generate(input_ids=prompts, sampling_params={"temperature": 0, "max_new_tokens": 4})
        steps = [step for step in engine.trace() if step["kind"] == "prefill"]
        return [answer["output_ids"] for answer in answers], sum(step["tokens"] for step in steps)

    long = [[6 + i] * 300 for i in range(4)]
    engine.flush_cache()
    told, computed = prefilled(long)
    engine.flush_cache()
    engine.inject_prefixes(long)
    engine.inject_prefixes(long)  # what is there already stays
    injected = prefilled(long)[1]
    engine.inject_prefixes([[200 + i] * 6000 for i in range(8)])  # more than the pool holds
    engine.flush_cache()
    honest = prefilled(long) == (told, computed)
    try:
        engine.reconfigure(tp=3)
    except sglang_pat.server.engine.ReconfigureError as error:
        code = error.code
    record = engine.reconfigure(tp=1)
    status = engine.status()
    info = engine.get_server_info()
    engine.shutdown()
    print(json.dumps(dict(
        refusal=refusal, base=[base.tp, base.dp], same=switched == plain, moved=moved, code=code, to=record["to_tp"],
        layout=status["layout"], switches=status["num_switches"], world=[info["tp_size"], info["dp_size"]],
        computed=computed, injected=injected, honest=honest,
    )))

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


def test_python_api(llama, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    count_start()
    command = [sys.executable, str(script), str(llama)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout.splitlines()[-1])
    assert "adaptive_tp=True" in found.pop("refusal")
    assert found == {
        "base": [1, 2], "same": True, "moved": [3, 3, 3], "code": 400, "to": 1,
        "layout": {"tp": 1, "dp": 2}, "switches": 4, "world": [2, 1],
        "computed": 4 * 300, "injected": 4, "honest": True,
    }  # fmt: skip


# -- without a tokenizer: tokens come straight from the ranks, in order all the same -----------------------------


def test_no_tokenizer(servers, llama):
    server = servers.adaptive(llama, 2, "--skip-tokenizer-init")
    stock = servers.stock(llama, max_total_tokens=65536)
    bodies = [body(seed, 120) for seed in range(4)]

    async def stream(session: aiohttp.ClientSession, request: dict[str, Any]) -> list[list[int]]:
        return [chunk["output_ids"] async for chunk in server.stream(session, request)]

    async def run() -> list[list[list[int]]]:
        async with server.session() as session:
            switches = ({"tp": tp, "arrived": 4, "step": step} for tp, step in ((2, 20), (1, 50), (2, 80)))
            await server.arm(session, *switches)
            return await asyncio.gather(*(stream(session, request) for request in bodies))

    for chunks, expected in zip(asyncio.run(run()), stock.generate(bodies), strict=True):
        assert chunks[-1] == expected["output_ids"]
        assert all(later[: len(chunk)] == chunk for chunk, later in zip(chunks, chunks[1:], strict=False))
