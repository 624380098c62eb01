"""Drafts without a model, how many of them are right, and how many a step checks (``sglang_pat/speculate``)."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from sglang_pat.config import AUTO_DRAFTS, MOST_DRAFTS, AdaptiveConfig
from sglang_pat.layout import ParallelLayout
from sglang_pat.policies.lengths import LengthHistory
from sglang_pat.policies.registry import make_policy
from sglang_pat.speculate import drafter as module
from sglang_pat.speculate.acceptance import BEGIN, GAIN, MATCHES, Acceptance, choose_counts
from sglang_pat.speculate.drafter import CONTEXT, Drafter, count_right
from sglang_pat.speculate.steps import DraftingPredictor

from .policy_world import crossing, machine, snapshot

PROMPT = list(range(100, 130))


def draft(drafter: Drafter, output: list[int], count: int = 4, name: str = "one", family: int = 1) -> list[int]:
    drafter.begin_step()
    return drafter.draft(family, name, PROMPT, output, count)


def count_kept(drafter: Drafter) -> int:
    """Tokens that are really there, and some for each text."""
    families = drafter._families.values()
    texts = sum(len(text) + CONTEXT for family in families for text, _ in family._texts.values())
    return texts + sum(len(output) for family in families for _, output in family._ended.values())


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


def test_all_is_taken_in_though_a_step_takes_little(monkeypatch):
    monkeypatch.setattr(module, "TAKEN_IN", 7)
    drafter, told = Drafter(), random.Random(1)
    texts = {name: [told.randrange(5000) for _ in range(60)] for name in ("two", "three")}
    for name, text in texts.items():
        drafter.end(1, name, PROMPT, text)
    for _ in range(40):
        draft(drafter, [9])
    assert all(draft(drafter, text[:30]) == text[30:34] for text in texts.values())


def test_all_requests_of_a_step_share_what_it_takes_in(monkeypatch):
    """Long responses of which nothing is known, as after a switch."""
    monkeypatch.setattr(module, "TAKEN_IN", 50)
    drafter, rng = Drafter(), random.Random(3)
    texts = [[rng.randrange(5000) for _ in range(300)] for _ in range(4)]
    for step in range(1, 40):
        drafter.begin_step()
        for name, text in enumerate(texts):
            for _ in range(2):
                drafter.find_match(1, str(name), PROMPT, text)
        assert count_kept(drafter) <= 50 * step + 4 * CONTEXT
    assert all(draft(drafter, text[:100], name="new") == text[100:104] for text in texts)


def test_what_is_kept_is_bounded(monkeypatch):
    """Few prompts again and again, and long ones that are all different."""
    monkeypatch.setattr(module, "MOST_TOKENS", 3000)
    drafter, rng = Drafter(), random.Random(4)
    for number in range(300):
        family = number % 3 if number < 150 else number
        text = [rng.randrange(5000) for _ in range(100)]
        for end in (30, 100):
            draft(drafter, text[:end], name=str(number), family=family)
        drafter.end(family, str(number), list(range(8000)), text)
        assert count_kept(drafter) == drafter._tokens <= 3000 + 2 * 100 + len(PROMPT) + CONTEXT
        kept = (prompt for one in drafter._families.values() for prompt, _ in one._ended.values())
        assert max(map(len, kept), default=0) <= CONTEXT
    assert len(drafter._families) > 10, "the last prompts are there"


def test_what_is_not_used_is_forgotten_first(monkeypatch):
    monkeypatch.setattr(module, "MOST_TOKENS", 200)
    drafter = Drafter()
    for family in range(10):
        drafter.end(family, "two", PROMPT, [1, 2, 3, family])
        assert draft(drafter, [1, 2, 3], 1, family=family) == [family]
    assert draft(drafter, [1, 2, 3], 1, family=9) == [9]
    assert draft(drafter, [1, 2, 3], 1, family=0) == [], "only the last few prompts fit"


def test_the_match_is_what_the_drafts_follow():
    drafter = Drafter()
    drafter.end(1, "two", PROMPT, [50, *range(20), 60])
    for seen in (1, 2, 5, 12, 15):
        assert drafter.find_match(1, "one", PROMPT, [70, *range(seen)]) == min(seen, CONTEXT)
    assert drafter.find_match(1, "one", PROMPT, [70, 80]) == 0


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
    assert all(count_kept(one) == one._tokens for one in both)


@pytest.mark.parametrize(
    ("drafted", "sampled", "right"),
    [([], [5], 0), ([5], [5, 6], 1), ([4], [5, 6], 0), ([5, 6, 7], [5, 6, 8, 9], 2), ([5, 9, 8], [5, 6, 8, 9], 1)],
)
def test_how_many_drafts_are_right(drafted, sampled, right):
    assert count_right(drafted, sampled) == right


# -- how many ---------------------------------------------------------------------------------------------------------


ALWAYS = (1.0,) * 8


def step_seconds(requests: int, row: float = 0.01, rows: int = 128) -> np.ndarray:
    """Seconds of steps with 0, 1, … drafts: a second, and so many more for each row."""
    return 1.0 + row * (requests + np.arange(rows - requests + 1))


def accept(right: int, match: int = 5, asked: int = 8, steps: int = 300) -> Acceptance:
    acceptance = Acceptance(AUTO_DRAFTS)
    for _ in range(steps):
        acceptance.pass_step()
        acceptance.record(match, asked, right)
    return acceptance


def test_drafts_are_right_as_often_as_they_were():
    chances = accept(right=3).estimate(5)
    assert chances[:3] == pytest.approx([1, 1, 1], abs=0.05) and max(chances[3:]) < 0.02
    mixed = Acceptance(4)
    for _ in range(400):
        mixed.pass_step()
        for right in (4, 0, 1, 0):
            mixed.record(2, 4, right)
    # The first draft is right for two of four; then the second for one of two; then both of one.
    assert mixed.estimate(2) == pytest.approx([0.5, 0.25, 0.25, 0.25], abs=0.03)


def test_a_match_tells_of_those_alike():
    """Wrong drafts after one equal token say nothing of those after twelve."""
    wrong = accept(right=0, match=1)
    assert wrong.estimate(1)[0] < 0.05 and [wrong.estimate(match)[0] for match in MATCHES[1:]] == BEGIN[1:, 0].tolist()
    assert wrong.estimate(0) == []
    assert accept(right=8, match=6).estimate(7)[7] > 0.9
    # Each class begins at its least match.
    for number, match in enumerate(MATCHES[1:], 1):
        found = accept(right=8, match=match)
        assert found.estimate(match)[0] > 0.9 and found.estimate(MATCHES[number] - 1)[0] == BEGIN[number - 1]


def test_as_many_drafts_as_are_right():
    for right in (1, 3, 8):
        assert choose_counts([accept(right).estimate(5)] * 4, step_seconds(4)) == [right] * 4


def test_a_row_goes_where_it_is_most_likely_right():
    counts = choose_counts([[0.9, 0.8, 0.1], [], [0.7, 0.02], [1.0] * 8], step_seconds(4, row=0.08))
    assert counts == [2, 0, 1, 8]


@pytest.mark.parametrize("seed", range(20))
def test_no_other_numbers_give_more_tokens_a_second(seed):
    rng = random.Random(seed)
    chances = [sorted((rng.random() for _ in range(3)), reverse=True) for _ in range(3)]
    seconds = step_seconds(3, row=rng.choice([0.02, 0.1, 0.5]))

    def rate(counts: tuple[int, ...] | list[int]) -> float:
        right = sum(sum(of_one[:count]) for of_one, count in zip(chances, counts, strict=True))
        return (3 + right) / seconds[sum(counts)]

    best = max(itertools.product(range(4), repeat=3), key=rate)
    found = choose_counts(chances, seconds)
    assert rate(found) == pytest.approx(rate(best) if rate(best) >= GAIN * rate([0] * 3) else rate([0] * 3))


def test_no_drafts_that_are_wrong():
    assert choose_counts([accept(0).estimate(5)] * 4, step_seconds(4)) == [0] * 4
    assert choose_counts([[]] * 4, step_seconds(4)) == [0] * 4


def test_no_drafts_where_rows_are_dear():
    assert choose_counts([ALWAYS] * 4, step_seconds(4, row=10.0)) == [0] * 4


def test_no_more_rows_than_there_is_room_for():
    assert choose_counts([ALWAYS] * 4, step_seconds(4, rows=4)) == [0] * 4
    assert sum(choose_counts([ALWAYS] * 4, step_seconds(4, rows=13))) == 9


def test_a_small_gain_is_none():
    """Two tokens in ``GAIN`` times less than twice the time: ``(1 + 2 row) / (1 + row) = 2 / GAIN``."""
    row = (2 - GAIN) / (2 * GAIN - 2)
    chosen = [choose_counts([[1.0]], step_seconds(1, row=each)) for each in (0.9 * row, 1.1 * row)]
    assert chosen == [[1], [0]]


def test_drafts_that_were_wrong_are_tried_again():
    acceptance, tried = accept(0), []
    for step in range(400):
        acceptance.pass_step()
        (count,) = choose_counts([acceptance.estimate(5)], step_seconds(1))
        if count:
            tried.append(step)
            acceptance.record(5, count, 0)
    assert 4 <= len(tried) <= 20 and tried[0] > 100


# -- what a policy makes of it ----------------------------------------------------------------------------------------


def test_seconds_a_token_where_drafts_pay():
    """Twice the rows take 1.03 times as long in the crossing's tp1, and give 1.5 tokens."""
    plain, _ = machine(crossing())
    drafting = DraftingPredictor(plain, [0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    assert drafting.step_seconds(1, 2, 2000) == pytest.approx(plain.step_seconds(1, 4, 4000) / 1.5)
    both = drafting.step_seconds(1, np.array([2.0, 100.0]), np.array([2000.0, 1e5]))
    assert both[0] == drafting.step_seconds(1, 2, 2000)
    assert both[1] == plain.step_seconds(1, 100, 1e5), "there is no room for 200 rows"
    assert type(drafting.step_seconds(1, 2, 2000, 1)) is float
    bounded = DraftingPredictor(plain, [0.5] + [0.0] * 7, max_running=3)
    assert bounded.step_seconds(1, 2, 2000) == plain.step_seconds(1, 2, 2000), "there is no room for four rows"
    sure = DraftingPredictor(plain, [1.0] * 8)
    assert sure.step_seconds(1, 1, 100) == pytest.approx(plain.step_seconds(1, 9, 900) / 9)


def test_drafts_of_a_trained_model_take_time():
    plain, _ = machine(crossing())
    one = plain.step_seconds(4, 1, 100)
    for seconds in (0.1 * one, 2.0 * one):
        drafting = DraftingPredictor(plain, [1.0] * 2, seconds)
        assert drafting.step_seconds(4, 1, 100) == pytest.approx(
            min(one, *((plain.step_seconds(4, 1 + k, 100 * (1 + k)) + k * seconds) / (1 + k) for k in (1, 2)))
        )
    assert drafting.step_seconds(4, 1, 100) == one


def test_drafts_that_do_not_pay_change_no_seconds():
    plain, _ = machine(crossing())
    for chances in ([], [0.0] * 8, [0.05] + [0.0] * 7):
        assert DraftingPredictor(plain, chances).step_seconds(4, 8, 800) == plain.step_seconds(4, 8, 800)


def test_the_policy_merges_later_where_drafts_are_right():
    """Rows are dear in the high degree: with drafts the low one is the better for more of the batch."""
    predictor, costs = machine(crossing())
    policy = make_policy("survival", predictor=predictor, costs=costs)

    def find_merge(chances: tuple[float, ...]) -> int:
        """Most requests with which a batch of 64 is merged."""
        seen = (replace(snapshot([200] * left, peak=64), chances=chances) for left in range(64, 0, -1))
        return next(len(each.load) for each in seen if policy(each, LengthHistory()).tp > 1)

    assert find_merge((0.95,) * 8) < find_merge(()) / 2


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
