"""Drafts without a model, how many of them are right, and how many a step checks (``sglang_pat/speculate``)."""

from __future__ import annotations

import random

import pytest

from sglang_pat.config import AUTO_DRAFTS, MOST_DRAFTS, AdaptiveConfig
from sglang_pat.layout import ParallelLayout
from sglang_pat.speculate import drafter as module
from sglang_pat.speculate.acceptance import GAIN, PROBE_STEPS, Acceptance, choose_count
from sglang_pat.speculate.drafter import Drafter, count_right

PROMPT = list(range(100, 130))


def draft(drafter: Drafter, output: list[int], count: int = 4, name: str = "one", family: int = 1) -> list[int]:
    return drafter.draft(family, name, PROMPT, output, count)


def test_a_response_repeats_itself():
    assert draft(Drafter(), [1, 2, 3, 4, 9, 1, 2, 3]) == [4, 9, 1, 2]


def test_a_response_repeats_its_prompt():
    assert draft(Drafter(), [7, 110, 111]) == [112, 113, 114, 115]


def test_nothing_is_drafted_after_what_was_never_there():
    assert draft(Drafter(), [7, 8, 9]) == []


def test_the_longest_context_counts():
    drafter = Drafter()
    drafter.end(1, "two", PROMPT, [1, 2, 3, 50, 8, 2, 3, 60, 9, 3, 70])
    assert draft(drafter, [1, 2, 3], 1) == [50]
    assert draft(drafter, [8, 2, 3], 1) == [60]
    assert draft(drafter, [9, 3], 1) == [70]


def test_of_equal_contexts_the_token_counts_that_came_most_often():
    drafter = Drafter()
    for name, token in (("two", 50), ("three", 60), ("four", 50)):
        drafter.end(1, name, PROMPT, [1, 2, token])
    assert draft(drafter, [1, 2], 1) == [50]


def test_responses_to_other_prompts_say_nothing():
    drafter = Drafter()
    drafter.end(2, "two", PROMPT, [1, 2, 3, 4])
    assert draft(drafter, [1, 2]) == []


def test_a_sibling_that_has_ended_is_followed():
    drafter, told = Drafter(), random.Random(0)
    text = [told.randrange(500) for _ in range(80)]
    draft(drafter, text[:40], name="two")
    drafter.end(1, "two", PROMPT, text)
    assert all(draft(drafter, text[:end]) == text[end : end + 4] for end in range(3, 80))


def test_all_is_taken_in_though_a_call_takes_little(monkeypatch):
    monkeypatch.setattr(module, "TAKEN_IN", 7)
    drafter, told = Drafter(), random.Random(1)
    texts = {name: [told.randrange(5000) for _ in range(60)] for name in ("two", "three")}
    for name, text in texts.items():
        drafter.end(1, name, PROMPT, text)
    for _ in range(40):
        draft(drafter, [9])
    assert all(draft(drafter, text[:30]) == text[30:34] for text in texts.values())


def test_what_is_not_used_is_forgotten_first(monkeypatch):
    monkeypatch.setattr(module, "MOST_TOKENS", 200)
    drafter = Drafter()
    for family in range(10):
        drafter.end(family, "two", PROMPT, [1, 2, 3, family])
        assert draft(drafter, [1, 2, 3], 1, family=family) == [family]
    assert draft(drafter, [1, 2, 3], 1, family=9) == [9]
    assert draft(drafter, [1, 2, 3], 1, family=0) == [], "only the last few prompts fit"


def test_a_drafter_forgets():
    drafter = Drafter()
    drafter.end(1, "two", PROMPT, [1, 2, 3])
    drafter.forget()
    assert draft(drafter, [1, 2]) == []


def test_two_drafters_with_the_same_calls_draft_alike():
    """The ranks of a group have one each."""
    rng, both = random.Random(2), (Drafter(), Drafter())
    texts: dict[str, list[int]] = {}
    for _ in range(400):
        name = rng.choice("abcdef")
        text = texts.setdefault(name, [])
        text += [rng.randrange(6) for _ in range(rng.randint(1, 3))]
        if rng.random() < 0.05:
            for one in both:
                one.end(ord(name) % 2, name, PROMPT, list(text))
            del texts[name]
        first, second = (draft(one, text, name=name, family=ord(name) % 2) for one in both)
        assert first == second


@pytest.mark.parametrize(
    ("drafted", "sampled", "right"),
    [([], [5], 0), ([5], [5, 6], 1), ([4], [5, 6], 0), ([5, 6, 7], [5, 6, 8, 9], 2), ([5, 9, 8], [5, 6, 8, 9], 1)],
)
def test_how_many_drafts_are_right(drafted, sampled, right):
    assert count_right(drafted, sampled) == right


# -- how many ---------------------------------------------------------------------------------------------------------


class Steps:
    """Predictor of steps of a second, and so many more for each row and each thousand tokens attended to."""

    def __init__(self, row: float = 0.01, thousand: float = 0.0) -> None:
        self._row, self._thousand = row, thousand

    def step_seconds(self, tp, batch, tokens, replicas=None):
        return 1.0 + self._row * batch + self._thousand * tokens / 1000


def accept(right: int, steps: int = 300, drafts: int = 8, requests: int = 4) -> Acceptance:
    acceptance = Acceptance(AUTO_DRAFTS)
    for _ in range(steps):
        acceptance.record(drafts, [right] * requests)
    return acceptance


def test_tokens_of_a_step():
    tokens = accept(right=3).compute_tokens(8)
    assert tokens[:4] == pytest.approx([1, 2, 3, 4], abs=0.02) and tokens[8] == pytest.approx(4, abs=0.03)
    mixed = Acceptance(4)
    for _ in range(400):
        mixed.record(4, [4, 0, 1, 0])
    # The first draft is right for two of four; then the second for one of two; then both of one.
    assert mixed.compute_tokens(4) == pytest.approx([1, 1.5, 1.75, 2, 2.25], abs=0.03)


def choose(acceptance: Acceptance, steps: Steps | None = None, requests: int = 4, most: int = 8) -> int:
    return choose_count(steps or Steps(), acceptance, 1, requests, 1000 * requests, most)


def test_as_many_drafts_as_are_right():
    assert [choose(accept(right)) for right in (1, 3, 8)] == [1, 3, 8]


def test_no_drafts_that_are_wrong():
    assert choose(accept(0)) == 0


def test_no_drafts_where_rows_are_dear():
    assert choose(accept(8), Steps(row=10.0)) == 0
    assert choose(accept(8), Steps(row=0.0, thousand=10.0)) == 0, "each row reads the KV"


def test_a_small_gain_is_none():
    """Two tokens in ``GAIN`` times less than twice the time: ``(1 + 2 row) / (1 + row) = 2 / GAIN``."""
    row = (2 - GAIN) / (2 * GAIN - 2)
    chosen = [choose(accept(1, drafts=1), Steps(row=each), requests=1, most=1) for each in (0.9 * row, 1.1 * row)]
    assert chosen == [1, 0]


def test_now_and_then_a_draft_is_tried():
    acceptance = accept(0)
    for _ in range(PROBE_STEPS):
        assert choose(acceptance) == 0
        acceptance.record_plain()
    assert choose(acceptance) == 1
    acceptance.record(1, [0])
    assert choose(acceptance) == 0


# -- the setting ------------------------------------------------------------------------------------------------------


def configure(speculate: str, **more) -> AdaptiveConfig:
    return AdaptiveConfig(base=ParallelLayout(1, 2), speculate=speculate, **more)


def test_how_many_drafts_are_asked_for():
    assert [configure(given).most_drafts for given in ("off", "1", str(MOST_DRAFTS))] == [0, 1, MOST_DRAFTS]
    assert configure("auto", profile="profile.json").most_drafts == AUTO_DRAFTS


@pytest.mark.parametrize("given", ["0", "-1", str(MOST_DRAFTS + 1), "on", "", "4.0"])
def test_a_setting_that_is_none(given):
    with pytest.raises(ValueError, match=r"--pat-speculate .*give off, auto, or a number of drafts, 1 to 16"):
        configure(given)


def test_auto_needs_a_profile():
    with pytest.raises(ValueError, match=r"--pat-speculate auto needs a profile: .*profiler.sweep"):
        configure("auto")
