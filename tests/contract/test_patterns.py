"""What a stop pattern may cost: no search takes more steps than :mod:`sglang_pat.fixes.patterns` says."""

from __future__ import annotations

import re
import re._parser as sre_parse
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sglang_pat.fixes import patterns

pytestmark = pytest.mark.contract

LETTERS, EDGES = st.sampled_from(["a", "b", ".", "[ab]", "[^a]", r"\w"]), st.sampled_from(["^", "$", r"\b", "(?:)"])
KINDS = ("({})", "(?:{})", "(?={})", "(?!{})", "(?>{})")
BOUNDS = st.sampled_from([0, 1, 2, 3, 5])


def repeated(inner: st.SearchStrategy[str], bounds: st.SearchStrategy[int]) -> st.SearchStrategy[str]:
    """``inner`` so and so often, greedily or not."""
    number = st.one_of(
        st.sampled_from(["*", "+", "?"]),
        st.builds("{{{}}}".format, bounds),
        st.builds("{{{},}}".format, bounds),
        st.tuples(bounds, bounds).map(lambda pair: "{{{},{}}}".format(*sorted(pair))),
    )
    return st.builds("(?:{}){}{}".format, inner, number, st.sampled_from(["", "?", "+"]))


def built(bounds: st.SearchStrategy[int]) -> st.SearchStrategy[str]:
    """Patterns without references to groups."""
    return st.recursive(
        st.one_of(LETTERS, LETTERS, EDGES),
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=3).map("".join),
            st.lists(inner, min_size=2, max_size=3).map("|".join).map("(?:{})".format),
            repeated(inner, bounds),
            repeated(LETTERS, bounds),
            st.builds(lambda kind, one: kind.format(one), st.sampled_from(KINDS), inner),
        ),
        max_leaves=6,
    )


class TooMany(Exception):
    """The search went on after as many steps as it may take."""


class Search:
    """Tries all ways in which a parsed pattern matches at one place, as Python's engine does, and counts."""

    def __init__(self, text: str, left: float) -> None:
        self.text = text
        self.left = left

    def count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise TooMany

    def sequence(self, parts: list[Any], at: int) -> Iterator[int]:
        """Where it may end."""
        if not parts:
            yield at
            return
        for end in self.part(*parts[0], at):
            yield from self.sequence(parts[1:], end)

    def part(self, token: Any, value: Any, at: int) -> Iterator[int]:
        if token == sre_parse.BRANCH:
            for branch in value[1]:
                yield from self.sequence(list(branch), at)
        elif token == sre_parse.SUBPATTERN:
            yield from self.sequence(list(value[-1]), at)
        elif token in (sre_parse.ASSERT, sre_parse.ASSERT_NOT):
            found = next(self.sequence(list(value[1]), at), None) is not None
            if found == (token == sre_parse.ASSERT):
                yield at
        elif token == sre_parse.ATOMIC_GROUP:
            yield from self.first(self.sequence(list(value), at))
        elif token == sre_parse.POSSESSIVE_REPEAT:
            yield from self.first(self.turns(*value, at, 0, lazy=False))
        elif token in (sre_parse.MAX_REPEAT, sre_parse.MIN_REPEAT):
            yield from self.turns(*value, at, 0, lazy=token == sre_parse.MIN_REPEAT)
        else:
            self.count()
            one = sre_parse.SubPattern(sre_parse.State(), [(token, value)])
            if (found := re._compiler.compile(one).match(self.text, at)) is not None:
                yield found.end()

    def first(self, ends: Iterator[int]) -> Iterator[int]:
        end = next(ends, None)
        if end is not None:
            yield end

    def turns(self, least: int, most: int, inner: Any, at: int, done: int, lazy: bool) -> Iterator[int]:
        if lazy and done >= least:
            yield at
        if done < most:
            for end in self.sequence(list(inner), at):
                if end > at or done < least:  # a turn too many that takes no text is not followed by another
                    yield from self.turns(least, most, inner, end, done + 1, lazy)
        if not lazy and done >= least:
            yield at


@given(pattern=built(BOUNDS), text=st.text("ab ", max_size=8))
def test_no_search_takes_more_steps(pattern, text):
    """From one place of the text; the score holds for texts of that length."""
    with patch.object(patterns, "LONGEST_TEXT", len(text)):
        steps = patterns.steps(pattern)
    assume(steps <= 3000)
    search = Search(text, steps)
    ends = list(search.sequence(list(sre_parse.parse(pattern)), 0))
    # The reference itself: what it finds first is what Python finds.
    found = re.match(pattern, text)
    assert (ends[0] if ends else None) == (found.end() if found else None)


@given(built(st.sampled_from([0, 1, 4095, 4096, 4097, 5000, 10**6, 2**32 - 2])))
def test_no_score_is_below_what_stands_there(pattern):
    """Numbers beyond the longest text made some negative, and the pattern was taken."""
    steps = patterns.steps(pattern)
    assert steps >= 0
    assert patterns.steps(pattern + "a") >= steps
    assert patterns.steps(f"(?:{pattern}){{4097,}}") >= 4097


ENDLESS = {
    "more than the longest text, excluded": r"(.+)+\x00(?!a{5000,})",
    "more than the longest text, at least": r"(.+)+\x00a{5000,}",
    "nothing, very often": "(?:(?:(?:(?=a)){1000}){1000}){1000}",
    "an empty group, very often": "(){1000000000}",
    "a long end after each of many ways": "a*a{2000}b",
    "optional inside optional": "(?:(?:(?:(?:a?)?)?)?){8}b",
    "a group, as often as possible": "(a)*b",
    "few more after many": r".*.{0,2}\x00",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_ones_are_refused(name):
    with pytest.raises(ValueError, match="may take for ever") as caught:
        patterns.check([ENDLESS[name]])
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "pattern",
    [
        r"\d+\n", "(yes|no)[.!]", "a{0,64}b", "<answer>.*</answer>", r"\n\n(Q|A):", r"\b(foo|bar|baz)\b", "a{5000,}",
        r"\*\*Final Answer\*\*[\s\S]*I hope it is correct", "(?:ab)*c", "(?i)stop.*here",
    ],
)  # fmt: skip
def test_usual_ones_are_taken(pattern):
    patterns.check([pattern])


def test_the_patterns_of_a_request_are_bounded_together():
    patterns.check(["a*b"] * 15)
    with pytest.raises(ValueError, match="may take for ever; write fewer"):
        patterns.check(["a*b"] * 16)
    with pytest.raises(ValueError, match="1025 characters, at most 1024"):
        patterns.check(["a" * 1000, "b" * 25])


def test_only_the_end_of_a_response_is_looked_through(monkeypatch):
    """A search takes time for each place of the text, times its length."""
    from sglang_pat.fixes import stops
    from sglang_pat.fixes.sampling import MAX_STOP_TEXT

    text = "x" * 10_000 + "y" * (MAX_STOP_TEXT + 1000)
    monkeypatch.setattr(stops, "_stock", lambda req: text)

    def seen(**params) -> str:
        return stops.tail_str(SimpleNamespace(sampling_params=SimpleNamespace(**params)))

    assert seen(stop_regex_strs=["x*z"]) == text[-patterns.LONGEST_TEXT :]
    assert seen(stop_regex_strs=[]) == text, "as SGLang has it"


def test_a_rank_looks_through_the_end_only(monkeypatch):
    from sglang.srt.managers.schedule_batch import Req

    from sglang_pat.fixes import stops

    monkeypatch.setattr(Req, "tail_str", Req.tail_str)
    stops.bound_text()
    ended = SimpleNamespace(
        sampling_params=SimpleNamespace(
            stop_strs=[], stop_regex_strs=["x"], stop_str_max_len=0, stop_regex_max_len=2**30
        ),
        output_ids=[0] * 9000, tokenizer=SimpleNamespace(decode=lambda ids: "x" + "y" * (len(ids) - 1)),
    )  # fmt: skip
    ended.tail_str = lambda: Req.tail_str(ended)
    assert not Req._check_str_based_finish(ended), "the x lies too far back"
    ended.output_ids = [0] * 4096
    assert Req._check_str_based_finish(ended)
