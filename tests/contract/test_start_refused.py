"""A start that is refused says so in its last line, in few lines, without a traceback."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_pat.config import AdaptiveConfig
from sglang_pat.host import adapter
from sglang_pat.launch import processes
from sglang_pat.layout import ParallelLayout
from sglang_pat.testing.ports import find_free_port

pytestmark = pytest.mark.contract

BASE = ["--tp", "1", "--dp", "2", "--adaptive-tp"]


CODE = "import sys\nfrom sglang_pat.launch_server import main\nmain(sys.argv[1:])"


def check_refused(done: subprocess.CompletedProcess[str], lines: int = 20) -> str:
    """Check that a start was refused in fewer than ``lines``; returns the last line of stderr."""
    assert done.returncode == 1, done.stderr
    assert len((done.stdout + done.stderr).splitlines()) < lines and "Traceback" not in done.stderr, done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith("error: ")
    return line


def test_no_such_model(run_code):
    done = run_code(CODE, *BASE, "--model-path", "/none/here")
    assert "--model-path /none/here: no such folder" in check_refused(done)


def test_ports(run_code, model):
    def ask(port: int) -> str:
        return check_refused(run_code(CODE, *BASE, "--model-path", model, "--port", port))

    highest = 55_535 if adapter.refusals.SECOND_PORT else 65_535
    assert f"choose one up to {highest}" in ask(highest + 1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        if port <= highest:
            assert "in use; choose another" in ask(port)


def test_no_temporary_folder(run_code, model):
    before = "import tempfile; tempfile.tempdir = '/proc/none'; tempfile.mkdtemp = lambda **_: open('/proc/none/x')"
    done = run_code(f"{before}\n{CODE}", *BASE, "--model-path", model)
    assert "set TMPDIR to a folder that can be written" in check_refused(done)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory) -> Path:
    """A model that SGLang runs at tp 1 only, which a rank finds out once it has loaded it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=64, n_layer=1, n_head=8, n_positions=64, vocab_size=503, bos_token_id=1, eos_token_id=2)
    GPT2LMHeadModel(config).save_pretrained(path := tmp_path_factory.mktemp("gpt2"))
    return path


OF_A_RANK = (
    "--adaptive-tp, transformer.h.0.attn.attn at tp=2: SGLang gives it 8 KV heads on each rank, must be 4: "
    "this model is not supported"
)


def test_a_refusal_of_a_rank_is_the_last_line_and_nothing_stays(run_code, gpt2):
    """One line, though both ranks say it, and no socket."""
    with tempfile.TemporaryDirectory(prefix="pat") as place:
        flags = ("--model-path", gpt2, "--port", find_free_port(), "--max-total-tokens", 512, "--skip-tokenizer-init")
        done = run_code(CODE, *BASE, *flags, env={"TMPDIR": place})
        assert check_refused(done, lines=100) == f"error: {OF_A_RANK}"
        assert not list(Path(place).glob(processes.FOLDER_PREFIX + "*"))


WRONG = """
import sys

from sglang_pat.cpu import shim

shim.ensure()

try:
    from sglang.srt.distributed import get_tensor_model_parallel_world_size
except ImportError:  # 0.5.23
    from sglang.srt.runtime_context import get_parallel

    def get_tensor_model_parallel_world_size():
        return get_parallel().tp_size

from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.registry import ModelRegistry

from sglang_pat.launch_server import main


class MergedWrongly(LlamaForCausalLM):
    "Has the shards of a Llama, but attends most to what is least alike."

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if get_tensor_model_parallel_world_size() > 1:
            for layer in self.model.layers:
                layer.self_attn.attn.scaling *= -1


class FailsMerged(LlamaForCausalLM):
    def forward(self, input_ids, *args, **kwargs):
        if get_tensor_model_parallel_world_size() > 1:
            raise IndexError("of a layer\\nthat is not there")
        return super().forward(input_ids, *args, **kwargs)


class NotBuilt(LlamaForCausalLM):
    def __init__(self, *args, **kwargs):
        assert get_tensor_model_parallel_world_size() == 1, "one rank only"
        super().__init__(*args, **kwargs)


ModelRegistry.models |= {kind.__name__: kind for kind in (MergedWrongly, FailsMerged, NotBuilt)}
main(sys.argv[1:])
"""
REFUSED = "--adaptive-tp does not support this model: "
LINES = {
    "MergedWrongly": REFUSED + "its logits at tp=2 are not those at tp=1 (prefill: off by ",
    "FailsMerged": REFUSED + "its forward pass at tp=2 fails with IndexError: of a layer that is not there",
    "NotBuilt": "--adaptive-tp: SGLang cannot build this model at tp=2 (AssertionError: one rank only): "
    "leave tp=2 out of --pat-candidates",
}


@pytest.mark.parametrize(
    "kind, flags",
    [*((kind, ()) for kind in LINES), ("MergedWrongly", ("--load-format", "dummy", "--dtype", "bfloat16"))],
)
def test_a_layout_that_computes_something_else(run_code, model, tmp_path, kind, flags):
    """The layout's shards are right.  Its error is seen with SGLang's tiny dummy weights, too."""
    folder = shutil.copytree(model, tmp_path / "model")
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(about | {"architectures": [kind]}))
    always = "--max-total-tokens 512 --dtype float32 --log-level error".split()
    flags = ("--model-path", folder, "--port", find_free_port(), *always, *flags)
    assert check_refused(run_code(WRONG, *BASE, *flags)).startswith(f"error: {LINES[kind]}")


PROGRAM = """
import gc, sys
import sglang_pat

if __name__ == "__main__":
    try:
        sglang_pat.Engine(
            model_path=sys.argv[1], tp_size=1, dp_size=2, adaptive_tp=True, max_total_tokens=512,
            skip_tokenizer_init=True,
        )
    except ValueError as error:
        print(error)
    gc.collect()
    print("goes on")
"""


@pytest.mark.long
def test_a_program_goes_on_after_a_refusal_of_a_rank(run_code, gpt2):
    """The program gets the same line in an exception."""
    done = run_code(PROGRAM, gpt2)
    assert done.stdout.splitlines()[-2:] == [OF_A_RANK, "goes on"], done.stderr
    assert done.returncode == 0, done.stderr


LEFT = """
import gc
import zmq.asyncio
from sglang_pat.cpu import shim
shim.install()
from sglang_pat.host import tokenizer as path
from sglang_pat.host.fixes import request_lifetime
from sglang_pat.server import tokenizer

def init(self, *_):
    context = zmq.asyncio.Context(2)
    self.recv_from_detokenizer = context.socket(zmq.PULL)
    self.again = self._result_dispatcher = self.pat_dropped = self
    self.is_pause_cond = self.model_update_lock = None

request_lifetime.StockTokenizerManager.__init__ = init
path.IsolatingDispatcher = lambda *_: 1 / 0
try:
    tokenizer.AdaptiveTokenizerManager(None, None)
except ZeroDivisionError:
    pass
gc.collect()
print("goes on")
"""


def test_the_manager_that_a_failed_start_leaves_is_no_garbage(run_code):
    """The ZMQ context of a manager waits for ever if it is garbage."""
    done = run_code(LEFT)
    assert done.stdout.endswith("goes on\n"), done.stderr


@pytest.mark.parametrize("given, before", [(None, ["ours"]), (print, [])])
def test_sglangs_handler_is_replaced_before_a_process_is_started(monkeypatch, given, before):
    """SGLang's handler would kill this process and leave its folder; a user's handler stays."""
    from sglang_pat.host import engine
    from sglang_pat.server.engine import AdaptiveEngine

    done: list[str] = []
    monkeypatch.setattr(engine, "end_if_a_child_fails", lambda: done.append("ours"))
    monkeypatch.setattr(engine, "start", lambda *_: done.append("start") or 1 / 0)
    spec = SimpleNamespace(config=AdaptiveConfig(base=ParallelLayout(1, 2)))
    args = SimpleNamespace(custom_sigquit_handler=given, spec=spec, enable_memory_saver=False)
    with pytest.raises(ZeroDivisionError):
        AdaptiveEngine._launch_scheduler_processes(args, None, engine.stock.run_scheduler_process)
    assert done == [*before, "start"]


def test_little_shared_memory(monkeypatch):
    from sglang_pat.launch import refusals

    config = AdaptiveConfig(base=ParallelLayout(1, 8))
    need = refusals.count_shared_memory_needed(config)
    assert 8 << 20 < need < 64 << 20, "what docker gives by default suffices"
    monkeypatch.setattr(refusals.shutil, "disk_usage", lambda _: SimpleNamespace(free=need - 1))
    with pytest.raises(ValueError, match="8 ranks need .* --shm-size"):
        refusals.check_shared_memory(config)
    monkeypatch.setattr(refusals.shutil, "disk_usage", lambda _: SimpleNamespace(free=need))
    refusals.check_shared_memory(config)


@pytest.mark.parametrize("host,key,warned", [
    ("127.0.0.1", None, False), ("localhost", None, False), ("::1", None, False), ("0.0.0.0", "k", False),
    ("0.0.0.0", None, True), ("10.0.0.3", None, True), ("node7", None, True),
])  # fmt: skip
def test_an_open_server_says_so(host, key, warned, caplog):
    from sglang_pat.host.engine import _warn_if_open

    _warn_if_open(SimpleNamespace(host=host, port=30_000, api_key=key))
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warned
