"""For pytest: SGLang's tests get a small model, and an engine of two CPU ranks that switches from start to end.

The model is a random one with SmolLM2's tokenizer, which is quick and seldom ends by itself; SmolLM2 itself where an
answer must make sense.
"""

from __future__ import annotations

import functools
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

from sglang_pat.plugin import VARIABLE
from sglang_pat.sglang import cpu_shim
from sglang_pat.testing import models
from sglang_pat.testing.prefork import ENVIRONMENT

DIFFERENCES = Path(__file__).with_name("differences.txt")
ADAPTIVE = not os.environ.get("STOCK")
FLAGS = {"device": "cpu", "dtype": "float32", "max_total_tokens": 40000}
"""What a CPU needs beside what a test says; SmolLM2's KV takes 46 KB a token."""

SENSIBLE = ("constrained_decoding", "json_mode", "ebnf", "matched_stop", "test_openai_server.py")
"""Parts of the names of files whose answers must make sense."""

MODELS = Path(".cache").resolve() / "models"

SECONDS = (0.1, 1.5)
"""Between two switches, at random."""

_switches = 0


def differences() -> dict[str, str]:
    """Reason by the end of a test's name: ``file::class::test``."""
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
    cpu_shim.ensure(children=True)
    if ADAPTIVE:
        os.environ[VARIABLE] = "base_tp=1,policy=manual"
    import sglang
    from sglang.test import test_utils

    stock, engine = test_utils.popen_launch_server, sglang.Engine

    @functools.wraps(stock)
    def launch(model: str, base_url: str, timeout: float, *args: Any, **named: Any) -> Any:
        flags = [word for name, value in FLAGS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        given = [str(word) for word in named.get("other_args") or ()]
        if "--attention-backend" in given:  # one for GPUs
            del given[(at := given.index("--attention-backend")) : at + 2]
        named["other_args"] = [*flags, *(["--tp", "2"] if ADAPTIVE else []), *given]
        process = stock(model, base_url, timeout, *args, **named | {"device": "cpu"})
        if ADAPTIVE:
            key = named.get("api_key") or (args[0] if args else None)
            threading.Thread(target=_switch, args=(base_url, key, process), daemon=True).start()
        return process

    test_utils.popen_launch_server = launch
    sglang.Engine = lambda **named: engine(**FLAGS | ({"tp_size": 2} if ADAPTIVE else {}) | named)


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Before a file is imported, which takes its models by name."""
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
    """To and fro, as long as the server lives."""
    global _switches
    draw, tp = random.Random(url), 2
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    while process.poll() is None:
        time.sleep(draw.uniform(*SECONDS))
        try:
            answer = requests.post(f"{url}/pat/reconfigure", json={"tp": tp}, headers=headers, timeout=120)
        except requests.RequestException:
            continue
        if answer.status_code == 200:
            _switches, tp = _switches + 1, 3 - tp


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not ADAPTIVE:
        return
    for item in items:
        for name, reason in differences().items():
            if item.nodeid.endswith(name):
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"{_switches} switches while the tests ran")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if ADAPTIVE and exitstatus == 0 and not _switches and not session.config.option.collectonly:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED  # nothing was shown
