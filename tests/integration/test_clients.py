"""Clients of SGLang's as their users run them, on servers that switch all the time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from on_cpu import cpu_jobs

from sglang_pat.testing.ports import find_free_port
from sglang_pat.testing.server import Server
from sglang_pat.testing.tokenizer import IM_START_ID, PAD_ID, SPECIAL_TOKENS

pytestmark = pytest.mark.integration

CALL = ("<tool_call>", "</tool_call>")
STEPS = 100_000
"""Steps of a schedule without end."""


@pytest.fixture(scope="module")
def model(flat, tmp_path_factory) -> Path:
    """A model with the tokens between which Qwen's tool calls are."""
    folder = tmp_path_factory.mktemp("clients") / "model"
    shutil.copytree(flat, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / name).read_text()
        for token, other in zip((SPECIAL_TOKENS[PAD_ID], SPECIAL_TOKENS[IM_START_ID]), CALL, strict=True):
            text = text.replace(token, other)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def four(model) -> Iterator[Server]:
    flags = "--tp 1 --dp 4 --adaptive-tp --pat-policy schedule --served-model-name tiny --tool-call-parser qwen25"
    with Server(model, *flags.split(), "--constrained-json-disable-any-whitespace") as server:
        yield server


@contextlib.contextmanager
def switching(server: Server) -> Iterator[None]:
    """The server switches inside the block at random, every 10 to 100 decode steps; at its end it must have."""
    degrees = [layout["tp"] for layout in server.status()["candidates"]]
    rng, entries, step, tp = random.Random(1), [], 0, server.status()["layout"]["tp"]
    while step < STEPS:
        step += rng.randint(10, 100)
        tp = rng.choice([degree for degree in degrees if degree != tp])
        entries.append({"tp": tp, "step": step})
    before = server.status()["num_switches"]
    assert server.post("/pat/schedule", entries).status_code == 200
    try:
        yield
    finally:
        assert server.post("/pat/schedule", []).status_code == 200
    assert server.status()["num_switches"] > before


# -- SGLang's own load generator ------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [10, pytest.param(120, marks=pytest.mark.soak)])
def test_bench_serving(four, model, tmp_path, seconds):
    """12 requests a second: all are answered, and no token is lost."""
    out, count = tmp_path / "bench.jsonl", 12 * seconds
    command = [
        sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang", "--base-url", four.url,
        "--model", str(model), "--dataset-name", "random-ids", "--random-input-len", "64", "--random-output-len", "64",
        "--num-prompts", str(count), "--request-rate", "12", "--seed", "1", "--output-file", str(out),
        "--output-details", "--disable-tqdm",
    ]  # fmt: skip
    with switching(four):
        done = subprocess.run(
            command, capture_output=True, text=True, env=cpu_jobs.environment(), timeout=20 * seconds + 300
        )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(out.read_text())
    assert result["completed"] == count and not any(result["errors"]), [e for e in result["errors"] if e][:3]
    asked = int(re.search(r"#Output tokens: (\d+)", done.stdout)[1])
    assert sum(result["output_lens"]) == asked
    records = four.status()["switches"]
    assert any(record["requests"] for record in records), "no switch had a request to move"
    assert not any(record["error"] for record in records)


# -- OpenAI's client ------------------------------------------------------------------------------------------

NO_BLANKS = {str(token): -100.0 for token in (6, 7, 8)}
"""Newline, tab and space: JSON allows any number of them."""
COLOURS = ["red", "green", "blue", "grey"]
LIST = {"type": "array", "items": {"enum": COLOURS}, "minItems": 30, "maxItems": 30}
SCHEMA = {"type": "object", "properties": {"colours": LIST}, "required": ["colours"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "paint", "parameters": SCHEMA, "strict": True}}


def chat(question: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 600, "logit_bias": NO_BLANKS} | more


ASKED = {
    "plain": chat("what is free?", max_tokens=200, extra_body={"ignore_eos": True}),
    "schema": chat("which colours?", response_format={
        "type": "json_schema", "json_schema": {"name": "colours", "schema": SCHEMA, "strict": True},
    }),
    "tool": chat("paint it", tools=[TOOL], tool_choice="required", parallel_tool_calls=False),
}  # fmt: skip


async def whole(client: Any, request: dict[str, Any]) -> str:
    message = (await client.chat.completions.create(**request)).choices[0].message
    return message.tool_calls[0].function.arguments if message.tool_calls else message.content


async def streamed(client: Any, request: dict[str, Any]) -> str:
    text, arguments = [], []
    async for chunk in await client.chat.completions.create(**request, stream=True):
        if chunk.choices:
            delta = chunk.choices[0].delta
            text.append(delta.content or "")
            arguments += [call.function.arguments or "" for call in delta.tool_calls or ()]
    return "".join(arguments or text)


@pytest.mark.long
def test_openai_client(four):
    """Text, a JSON schema and a tool call, streamed and whole, are what they are without switches."""
    import openai

    async def ask(rounds: int) -> dict[str, list[str]]:
        async with openai.AsyncOpenAI(base_url=four.url + "/v1", api_key="none", max_retries=0) as client:
            jobs = {name: [how(client, body) for how in (whole, streamed) * rounds] for name, body in ASKED.items()}
            return {name: await asyncio.gather(*answers) for name, answers in jobs.items()}

    four.reconfigure(1)
    wanted = asyncio.run(ask(1))
    for name, (one, pieces) in wanted.items():
        assert one == pieces, name
    for name in ("schema", "tool"):
        assert set(json.loads(wanted[name][0])["colours"]) <= set(COLOURS), name
    with switching(four):
        found = asyncio.run(ask(2))
    for name, answers in found.items():
        assert set(answers) == set(wanted[name]), name


# -- sglang-router in front of two servers --------------------------------------------------------------------


@contextlib.contextmanager
def router(folder: Path, *servers: Server) -> Iterator[str]:
    """sglang-router; its URL."""
    port = find_free_port()
    command = [
        sys.executable,
        "-m",
        "sglang_router.launch_router",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--policy",
        "power_of_two",
        "--prometheus-port",
        str(find_free_port()),
        "--worker-urls",
        *(s.url for s in servers),
    ]
    with (folder / "router.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            assert process.poll() is None, (folder / "router.log").read_text()[-3000:]
            with contextlib.suppress(requests.RequestException):  # it says that it is healthy before it has workers
                found = requests.get(url + "/workers", timeout=5).json()["workers"]
                if len(found) == len(servers) and all(worker["is_healthy"] for worker in found):
                    break
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


@pytest.mark.long
def test_router_in_front_of_two_servers(four, model, tmp_path):
    sampling = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}
    bodies = [{"input_ids": [5 + i, 7 + 3 * i, 9], "sampling_params": sampling} for i in range(48)]
    flags = "--tp 1 --dp 2 --adaptive-tp --pat-policy schedule --served-model-name tiny".split()
    with Server(model, *flags) as two, router(tmp_path, four, two) as url:
        wanted = [answer["output_ids"] for answer in two.generate(bodies)]

        async def through() -> list[dict[str, Any]]:
            async with two.session() as session:

                async def one(body: dict[str, Any]) -> dict[str, Any]:
                    async with session.post(url + "/generate", json=body) as response:
                        assert response.status == 200, await response.text()
                        return await response.json()

                return await asyncio.gather(*map(one, bodies))

        with switching(four), switching(two):
            answers = asyncio.run(through())
        assert [answer["output_ids"] for answer in answers] == wanted
        workers = requests.get(url + "/workers", timeout=30).json()
        assert len(workers["workers"]) == 2, workers
