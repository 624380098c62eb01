"""A plug-in for pytest: SGLang's tests get a small model, and an engine of two CPU ranks that switches all the time.

The model is a random one with SmolLM2's tokenizer, which is quick and seldom ends by itself; SmolLM2 itself where an
answer must make sense.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import requests

from sglang_pat.config import VARIABLE
from sglang_pat.cpu import shim
from sglang_pat.testing import models
from sglang_pat.testing.prefork import ENVIRONMENT

DIFFERENCES = Path(__file__).with_name("differences.txt")
LEFT_OUT = "left out: "
"""Begins the reason of one that is not run: it says nothing here, or its end depends on the moment."""

ADAPTIVE = not os.environ.get("STOCK")
FLAGS = {"device": "cpu", "dtype": "float32", "max_total_tokens": 40000}
"""What a CPU needs beside what a test says; SmolLM2's KV takes 46 KB a token."""

SENSIBLE = (
    "constrained_decoding", "json_mode", "ebnf", "matched_stop", "ignore_eos", "test_openai_server.py",
    "server_hidden_states", "penalty",
)  # fmt: skip
"""Parts of the names of files whose answers must make sense."""

ONE_REPLICA = ("request_queue", "priority", "large_max")
"""Parts of the names of files that count what one scheduler admits, or read it in its log.

Limits and priorities hold for each replica, so the engine goes to one replica and stays there."""

MODELS = Path(".cache").resolve() / "models"

SECONDS = (0.1, 1.5)
"""Seconds between two switches of a server, at random.  An ``Engine`` switches by a schedule, every three tokens."""

_servers = _switches = 0
_logs: list[Path] = []
"""Decisions of each ``Engine``."""
_test = ""


def differences() -> dict[str, str]:
    """Reason by part of a test's name: ``file::class::test``, or ``file::class`` for all of a class."""
    lines = [line.split(None, 1) for line in DIFFERENCES.read_text().splitlines() if line and line[0] != "#"]
    return {name: reason.strip() for name, reason in lines}


def pytest_configure(config: pytest.Config) -> None:
    os.environ.update(ENVIRONMENT, HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    command = Path(tempfile.mkdtemp()) / "sglang"  # which an environment on top of another one lacks
    command.write_text(
        f"#!{sys.executable}\nfrom sglang.cli.main import main\nif __name__ == '__main__':\n    main()\n"
    )
    command.chmod(0o755)
    os.environ["PATH"] = os.pathsep.join([str(command.parent), os.environ["PATH"]])
    shim.ensure(children=True)
    _adapt("manual")
    schedule = command.with_name("schedule.jsonl")
    schedule.write_text("".join(f'{{"tp": {2 - at % 2}, "tokens": {3 * at + 3}}}\n' for at in range(200)))
    import sglang
    from sglang.test import test_utils

    stock, engine, runtime = test_utils.popen_launch_server, sglang.Engine, sglang.Runtime

    @functools.wraps(stock)
    def launch(model: str, base_url: str, timeout: float, *args: Any, **named: Any) -> Any:
        alone = any(word in _test for word in ONE_REPLICA)
        # Ends answers of 10000 tokens, where a test does not count on all of them.
        wanted = FLAGS | ({"context_length": 1024} if alone and "priority" not in _test else {})
        flags = [word for name, value in wanted.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        given = [str(word) for word in named.get("other_args") or ()]
        if "--attention-backend" in given:  # one for GPUs
            del given[(at := given.index("--attention-backend")) : at + 2]
        if not ADAPTIVE:  # xgrammar has no kernels for a CPU; the adaptive engine takes llguidance by itself
            given = ["--grammar-backend", "llguidance", *("llguidance" if one == "xgrammar" else one for one in given)]
        if not Path(model).exists():  # a file's own choice
            model, given = str(MODELS / "peers"), ["--served-model-name", model, *given]
        named["other_args"] = [*flags, *(["--tp", "2"] if ADAPTIVE else []), *given]
        global _servers
        process = stock(model, base_url, timeout, *args, **named | {"device": "cpu"})
        if ADAPTIVE:
            _servers += 1
            key = named.get("api_key") or (args[0] if args else None)
            if alone:
                _reconfigure(base_url, key, 2).raise_for_status()
            else:
                threading.Thread(target=_switch, args=(base_url, key, process), daemon=True).start()
        return process

    test_utils.popen_launch_server = launch
    ours = FLAGS | ({"tp_size": 2} if ADAPTIVE else {})

    def launch_in_process(stock: Any, **named: Any) -> Any:
        _logs.append(command.with_name(f"decisions{len(_logs)}.jsonl"))
        _adapt(f"schedule,schedule={schedule},log={_logs[-1]}")
        try:
            return stock(**ours | named)
        finally:
            _adapt("manual")

    sglang.Engine = functools.partial(launch_in_process, engine)
    sglang.Runtime = functools.partial(launch_in_process, runtime)


def _adapt(policy: str) -> None:
    if ADAPTIVE:
        os.environ[VARIABLE] = f"base_tp=1,policy={policy}"


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Set models before a file is imported, which takes them by name."""
    if not isinstance(collector, pytest.Module):
        return
    from sglang.test import test_utils

    model = models.make_smollm2(MODELS / "smollm2")
    if not any(word in str(collector.path) for word in SENSIBLE):
        model = _random(model)
    for name in vars(test_utils):
        if name.startswith("DEFAULT_") and name.endswith(("MODEL_NAME_FOR_TEST", "MODEL_NAME_FOR_TEST_BASE")):
            setattr(test_utils, name, str(model))


def _random(tokenizer: Path) -> Path:
    made = models.make_random("llama", MODELS / "random-65536", vocab=65536, kv_heads=2, context=32768)
    folder = MODELS / "peers"
    shutil.copytree(made, folder, dirs_exist_ok=True)
    for file in (*tokenizer.glob("*token*"), tokenizer / "chat_template.jinja"):
        shutil.copy(file, folder)
    return folder


def _switch(url: str, key: str | None, process: Any) -> None:
    """Switch to and fro, as long as the server lives."""
    draw, tp = random.Random(url), 2
    while process.poll() is None:
        time.sleep(draw.uniform(*SECONDS))
        try:
            answer = _reconfigure(url, key, tp)
        except requests.RequestException:
            continue
        if answer.ok:
            tp = 3 - tp


def _reconfigure(url: str, key: str | None, tp: int) -> requests.Response:
    global _switches
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    answer = requests.post(f"{url}/pat/reconfigure", json={"tp": tp}, headers=headers, timeout=120)
    _switches += answer.ok
    return answer


def pytest_runtest_logstart(nodeid: str) -> None:
    global _test
    _test = nodeid


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    listed = differences()
    for item in list(items):
        for name in (name for name in listed if f"{name}::" in f"{item.nodeid}::"):
            if listed[name].startswith(LEFT_OUT):
                items.remove(item)
                config.hook.pytest_deselected(items=[item])
            elif ADAPTIVE:
                item.add_marker(pytest.mark.xfail(reason=listed[name], strict=True))


def _all_switches() -> int:
    """Least number of switches: those of servers, and those that the decisions of engines show."""
    found = _switches
    for log in filter(Path.exists, _logs):
        events = map(json.loads, log.read_text().splitlines())
        degrees = [event["snapshot"]["tp"] for event in events if "decision" in event]
        found += sum(old != new for old, new in itertools.pairwise(degrees))
    return found


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"{_all_switches()} switches while the tests ran")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if ADAPTIVE and exitstatus == 0 and (_servers or _logs) and not _all_switches():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED  # nothing was shown
