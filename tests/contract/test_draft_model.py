"""A trained drafter of ours drafts as SGLang's own, and says what it cannot use."""

from __future__ import annotations

import json
import pickle
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

from sglang_pat.host import adapter, features, runner
from sglang_pat.rank.draft_model import KEPT, PLACES, WINDOW, DraftModel, Pairs, count_head_bytes, read_config
from sglang_pat.rank.model_drafts import Lines, choose_rows
from sglang_pat.testing import models

pytestmark = pytest.mark.contract

STEPS = 20


@pytest.fixture
def head(tmp_path):
    return models.make_head(tmp_path / "head", drafts=range(0, 503, 2))


def make_model(folder, lines: int = 4) -> DraftModel:
    return DraftModel(folder, read_config(folder), lines, torch.float32, "cpu")


@pytest.mark.long
@pytest.mark.skipif(
    adapter.FOLDER == "v0_5_23",
    reason="its module needs the whole of SGLang 0.5.23's context; it is the same as before",
)
def test_it_drafts_as_sglangs(head, model, run_code):
    embedding, features, tokens = torch.randn(503, 64), torch.randn(STEPS, 128), torch.randint(0, 503, (STEPS,))
    save_file({"embedding": embedding, "features": features, "tokens": tokens}, head / "given.safetensors")
    theirs = run_code(
        "from tests.contract.eagle_case import main\nimport pathlib, sys\nmain(pathlib.Path(sys.argv[1]), sys.argv[2])",
        head,
        model,
    )
    assert theirs.returncode == 0, theirs.stderr
    (head / "given.safetensors").unlink()
    ours, found, line = make_model(head), [], torch.tensor([2])

    def embed(ids):
        return embedding[ids]

    for i in range(STEPS):
        ours.learn(Pairs(line, torch.tensor([i]), tokens[i : i + 1], features[i : i + 1], line * 0), embed)
        # Further drafts leave keys and values that the next tokens replace.
        found.append(int(ours.draft(line, 3, embed)[0, 0]))
    assert found == json.loads(theirs.stdout.splitlines()[-1])


def test_requests_do_not_see_each_other(head):
    """What is drafted for several requests, learnt in pieces, is what each gets by itself."""
    embedding, lengths = torch.randn(503, 64), (7, 3, 12)
    rows = [(line, at) for line, length in enumerate(lengths) for at in range(length)]
    lines, positions = torch.tensor(rows).unbind(1)
    tokens, features = torch.randint(0, 503, (len(rows),)), torch.randn(len(rows), 128)

    def feed(model, chosen):
        of = lines[chosen].tolist()
        last = torch.tensor([max(i for i, line in enumerate(of) if line == one) for one in dict.fromkeys(of)])
        pairs = Pairs(lines[chosen], positions[chosen], tokens[chosen], features[chosen], last)
        model.learn(pairs, lambda t: embedding[t])

    together = make_model(head)
    for piece in (range(5), range(5, 12)):
        feed(together, torch.tensor([i for i, (_, at) in enumerate(rows) if at in piece]))
    drafted = together.draft(torch.arange(3), 4, lambda t: embedding[t])
    for line in range(3):
        alone = make_model(head)
        feed(alone, (lines == line).nonzero()[:, 0])
        assert alone.draft(torch.tensor([line]), 4, lambda t: embedding[t])[0].tolist() == drafted[line].tolist()
        alone.forget(line)
        assert (alone._at[line] == -1).all()


@pytest.mark.parametrize("length", [KEPT // 2, KEPT + 1, PLACES + KEPT // 2])
def test_another_rank_goes_on_with_what_was_learnt(head, length):
    """A rank that takes a request over drafts as one that has learnt its last tokens itself."""
    embedding, tokens, features = torch.randn(503, 64), torch.randint(0, 503, (length,)), torch.randn(length, 128)

    def feed(model, line, first, last):
        for at in range(first, last, WINDOW):
            part = torch.arange(at, min(at + WINDOW, last))
            pairs = Pairs(
                torch.full_like(part, line), part, tokens[part], features[part], torch.tensor([len(part) - 1])
            )
            model.learn(pairs, lambda t: embedding[t])

    def draft(model, line):
        return model.draft(torch.tensor([line]), 4, lambda t: embedding[t])[0].tolist()

    whole, last, taken = (make_model(head) for _ in range(3))
    feed(whole, 1, 0, length)
    feed(whole, 3, 0, 5)
    whole.draft(torch.tensor([1, 3]), 4, lambda t: embedding[t])  # its keys are not those of the request
    feed(last, 0, max(length - KEPT, 0), length)
    feed(taken, 2, 0, min(length, WINDOW))  # of another request
    taken.write(torch.tensor([2, 0]), pickle.loads(pickle.dumps(whole.read(torch.tensor([1, 3])))))
    assert draft(taken, 2) == draft(last, 0)
    assert draft(taken, 0) == draft(whole, 3)
    taken.write(torch.tensor([2]), whole.read(torch.tensor([3])))
    assert draft(taken, 2) == draft(whole, 3)


def test_its_size_is_known_before_a_rank_starts(head):
    model = make_model(head)
    held = sum(value.nbytes for value in vars(model).values() if isinstance(value, torch.Tensor))
    tables = sum(value.nbytes for value in (model._at, model._last, model._hidden))
    assert count_head_bytes(head, 4, 4) == pytest.approx(held - tables, rel=0.03)
    (head / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"^no \*.safetensors and no pytorch_model\*.bin in it$"):
        count_head_bytes(head, 4, 4)


BAD = [
    ({"draft_vocab_size": None}, "draft_vocab_size"),
    ({"norm_before_residual": True}, "norm_before_residual"),
    ({"hidden_size": 32}, "has shape"),
]


@pytest.mark.parametrize(("change", "said"), BAD, ids=[said for _, said in BAD])
def test_heads_that_cannot_be_used(head, change, said):
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=said) as error:
        make_model(head)
    assert "\n" not in str(error.value)


def test_the_gpu_is_free_of_the_head_while_the_engine_sleeps(head, monkeypatch):
    """A head is made in the region of the weights, and keeps its contents, which nobody sends again."""
    regions, inside = [], []

    @contextmanager
    def region(tag, enable_cpu_backup=False):
        regions.append((tag, enable_cpu_backup))
        yield
        regions.append("left")

    class Seen(DraftModel):
        def __init__(self, *args):
            inside.append(regions[-1])
            super().__init__(*args)

    monkeypatch.setattr(runner, "DraftModel", Seen)
    rank = SimpleNamespace(
        model=make_layers(Layer, 4),
        model_config=SimpleNamespace(num_hidden_layers=4, hidden_size=64, vocab_size=503),
        server_args=SimpleNamespace(spec=SimpleNamespace(graph_sizes={})),
        dtype=torch.float32,
        device="cpu",
        memory_saver_adapter=SimpleNamespace(region=region),
    )
    runner._load_drafter(rank, head)
    assert inside == [("weights", True)] and regions[-1] == "left"
    with TorchMemorySaverAdapter.create(enable=False).region("weights", enable_cpu_backup=True):  # as SGLang takes it
        pass


def test_the_head_of_another_model(head):
    make_model(head).check(128, 64, 503)
    with pytest.raises(ValueError, match="it is the head of another model: of 128 features, .* not 192, 64 and 503"):
        make_model(head).check(192, 64, 503)
    save_file({"fc.weight": torch.zeros(64, 128)}, head / "model.safetensors")
    with pytest.raises(ValueError, match="it has no weight input_layernorm.weight"):
        make_model(head)


def test_a_weight_that_is_not_used(head):
    save_file(
        load_file(head / "model.safetensors") | {"input_norm.weight": torch.ones(128)}, head / "model.safetensors"
    )
    with pytest.raises(ValueError, match="it has weights that .* has not: input_norm.weight"):
        make_model(head)


def test_lines_go_to_those_that_learnt_last():
    lines = Lines(2)
    assert [lines.use(name, 5)[1] for name in ("a", "b", "a")] == [True, True, False]
    assert lines.find("a", 5) is not None and lines.find("a", 6) is None
    line, new = lines.use("c", 7)
    assert new and lines.find("b", 5) is None and lines.find("c", 7) == line
    lines.end("a")
    lines.end("b")
    assert lines.use("d", 1)[1] and lines.find("c", 7) == line
    lines.keep({"c"})
    assert lines.find("c", 7) == line and lines.find("d", 1) is None
    lines.keep(())
    assert lines.find("c", 7) is None


def test_rows_worth_learning():
    names, positions = [*"aaabb", "gone"], [7, 8, 9, 3, 4, 0]
    # The last token of "a" has none after it, nor has the draft of "b" that was wrong.
    assert choose_rows(names, positions, {"a": 10, "b": 5}) == [0, 1, 3]


def test_rows_of_a_step():
    reqs = [SimpleNamespace(rid=name) for name in "ab"]
    prefill = SimpleNamespace(forward_mode=ForwardMode.EXTEND, reqs=reqs, prefix_lens=[4, 0], extend_lens=[3, 5])
    rows = features.list_rows(prefill, 1, 4)
    assert rows == features.Rows([*"aaabbbb"], [4, 5, 6, 1, 2, 3, 4], [0, 1, 2, 4, 5, 6, 7], 8)
    decode = SimpleNamespace(forward_mode=ForwardMode.DECODE, reqs=reqs, seq_lens_cpu=torch.tensor([7, 5]))
    assert features.list_rows(decode, 2, 4) == features.Rows(["a", "b"], [6, 4], [0, 1], 2)
    assert features.list_rows(decode, 1, 4) is None


class Layer(torch.nn.Module):
    """A decoder layer as SGLang 0.5.12 calls it."""

    def forward(self, positions, hidden_states, forward_batch, residual):
        return hidden_states, residual


class NewLayer(torch.nn.Module):
    """A decoder layer as SGLang 0.5.23 calls it."""

    def forward(self, positions, hidden_states, forward_batch, capture_output=None):
        if capture_output is not None:
            capture_output(hidden_states)
        return hidden_states.zero_()


def make_layers(kind, count: int) -> torch.nn.Module:
    model = torch.nn.Module()
    model.model = torch.nn.Module()
    model.model.layers = torch.nn.ModuleList([kind() for _ in range(count)])
    return model


@pytest.mark.parametrize("kind", [Layer, NewLayer])
@pytest.mark.parametrize("total", [3, 6])
def test_features_are_the_inputs_of_layers(kind, total):
    """A small step goes through the buffer, a large one does not."""
    tap = features.FeatureTap([2, 1], 2, 4, torch.float32, "cpu")
    model = make_layers(kind, 3)
    tap.attach(model)
    given = torch.rand(2, 2, total, 2)
    rows = features.Rows([], [], [0, 2], total)
    wanted = torch.cat([given[1].sum(0), given[0].sum(0)], dim=1)[[0, 2]]
    for layer, (hidden, residual) in zip(model.model.layers[1:], given, strict=True):
        if kind is Layer:
            layer(None, hidden, None, residual=residual)
        else:
            layer(None, hidden + residual, None, capture_output=None)
    assert tap.take(rows).equal(wanted)
    with pytest.raises(ValueError, match="the model has 3 layers"):
        features.FeatureTap([3], 2, 4, torch.float32, "cpu").attach(model)
    with pytest.raises(ValueError, match="and no residual"):
        model.model.layers[1].forward = lambda hidden_states: hidden_states
        tap.attach(model)
