"""Penalties counted from whole histories: the state of SGLang's own counting, bit for bit."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.sampling import penaltylib

from sglang_pat.host import adapter
from sglang_pat.host.fixes import penalties

pytestmark = pytest.mark.contract

VOCAB = 40
KINDS = {
    penaltylib.BatchedFrequencyPenalizer,
    penaltylib.BatchedMinNewTokensPenalizer,
    penaltylib.BatchedPresencePenalizer,
    penaltylib.BatchedRepetitionPenalizer,
}


class Batch:
    """What SGLang's penalties read of a batch; can be referred to weakly."""

    device = "cpu"

    def __init__(self, reqs: list, enable_overlap: bool = False) -> None:
        self.reqs = reqs
        self.enable_overlap = enable_overlap


def random_request(rng: random.Random) -> SimpleNamespace:
    def maybe(value, otherwise):
        return value if rng.random() < 0.6 else otherwise

    params = SimpleNamespace(
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0), presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        repetition_penalty=maybe(rng.uniform(0.5, 2), 1.0), min_new_tokens=maybe(rng.randint(1, 60), 0),
        stop_token_ids={rng.randrange(VOCAB)},
    )  # fmt: skip
    tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=2)
    return SimpleNamespace(sampling_params=params, tokenizer=tokenizer, eos_token_ids=None)


def tensors(penalizer) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(penalizer).items() if isinstance(value, torch.Tensor)}


def test_no_end_comes_before_its_time():
    """SGLang 0.5.12 holds back the tokenizer's ends, not those that only the generation config names."""
    req = random_request(random.Random(0))
    req.sampling_params.min_new_tokens, req.eos_token_ids = 3, {7, 9}
    if adapter.FOLDER == "v0_5_12":
        req.eos_token_ids.add(10**6)
    found = penalties.OrderedPenalties(VOCAB, Batch([req]), KINDS)
    kind = penaltylib.BatchedMinNewTokensPenalizer
    added = found.penalizers[adapter.sampling.AT_ONCE.get(kind, kind)].stop_token_penalties
    held_back = set(added[0].isinf().nonzero().flatten().tolist())
    assert held_back == {2, 7, 9} | req.sampling_params.stop_token_ids


def test_they_are_applied_in_one_order():
    """SGLang gives a set of classes, whose order differs from process to process."""
    made = penalties.OrderedPenalties(VOCAB, Batch([]), KINDS).penalizers
    multiplicative = [penalizer.is_multiplicative for penalizer in made.values()]
    assert multiplicative == sorted(multiplicative)


@pytest.mark.parametrize("seed", range(24))
def test_histories_at_once_are_as_token_by_token(seed):
    rng = random.Random(seed)
    reqs = [random_request(rng) for _ in range(rng.randint(1, 9))]
    # Few tokens that come often: sums of many floats.
    histories = [[rng.randrange(rng.randint(1, VOCAB)) for _ in range(rng.choice([0, 1, 7, 150]))] for _ in reqs]
    batch = Batch(reqs)
    found = penalties.OrderedPenalties(VOCAB, batch, KINDS)
    counted = [history if penalties.is_penalized(req) else () for req, history in zip(reqs, histories, strict=True)]
    penalties.count_histories(found, counted, [len(history) for history in histories])

    singles = [Batch([req]) for req in reqs]
    alone = [penalties.OrderedPenalties(VOCAB, single, KINDS) for single in singles]
    for one, history in zip(alone, histories, strict=True):
        for penalizer in one.penalizers.values():
            penalizer.prepare()
        for token in history:
            one.cumulate_output_tokens(torch.tensor([token]))
    counted = 0
    for kind, penalizer in found.penalizers.items():
        if not penalizer.is_prepared():
            continue
        for name, value in tensors(penalizer).items():
            for row, one in enumerate(alone):
                assert torch.equal(value[row], tensors(one.penalizers[kind])[name][0]), (kind.__name__, name, row)
                counted += 1
    assert counted or not found.is_required

    # And so it goes on.
    step = torch.tensor([rng.randrange(VOCAB) for _ in reqs])
    found.cumulate_output_tokens(step)
    logits = torch.randn(len(reqs), VOCAB)
    expected = logits.clone()
    for row, one in enumerate(alone):
        one.cumulate_output_tokens(step[row : row + 1])
        one.accumulate_additive_penalties(expected[row : row + 1])
    found.accumulate_additive_penalties(logits)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("seed", range(8))
def test_with_overlap_a_switch_changes_nothing(seed):
    """Against SGLang's own counting with overlap scheduling, whose results come one step late and without a break:
    the state that a step samples with is the same after a switch, a re-prefill, and whenever the result of the step
    before is known early."""
    rng = random.Random(seed)
    req = random_request(rng)
    req.origin_input_ids, answer = [rng.randrange(VOCAB) for _ in range(3)], [rng.randrange(8) for _ in range(30)]
    stock_batch, batch = Batch([req], True), Batch([req], True)
    theirs = penalties._StockPenalties(VOCAB, stock_batch, KINDS)

    def state(found) -> dict:
        return {
            (next(stock.__name__ for stock in KINDS if issubclass(kind, stock)), name): value
            for kind, one in found.penalizers.items()
            for name, value in tensors(one).items()
        }

    def anew(decode: bool):
        made = penalties.OrderedPenalties(VOCAB, batch, KINDS)
        if made.is_required:
            history = penalties.list_counted_tokens(req, True, decode)
            penalties.count_histories(made, [history], [len(history)])
        return made

    req.output_ids = []
    ours = anew(decode=False)
    for step in range(len(answer)):  # decode step, which makes answer[step + 1]
        req.kv_committed_len = len(req.origin_input_ids) + step  # 0.5.23 has it in req.kv
        req.kv = req
        # SGLang, never interrupted: it knows answer[:step] when it launches this step.
        late = answer[step - 1] if step else req.origin_input_ids[-1]
        theirs.cumulate_output_tokens(torch.tensor([late]))
        what = rng.choice(["late", "early", "switch", "prefill"])
        req.output_ids = answer[: step + (what != "late")]
        if what == "switch":
            ours = anew(decode=True)
        ours.cumulate_output_tokens(torch.tensor([req.output_ids[-1] if req.output_ids else req.origin_input_ids[-1]]))
        if what == "prefill":  # the step is made as a prefill instead
            ours = anew(decode=False)
        assert all(torch.equal(value, state(theirs)[key]) for key, value in state(ours).items()), (step, what)
        assert state(ours).keys() == state(theirs).keys()
