"""Drafts without a model (:class:`Drafter`): what came after the same tokens in the prompt, in the response so far, and
in responses to the same prompt.

DAS (MLSys 2026) and Seer (2025) draft from such responses, too, in suffix trees.  Here a context of one to three tokens
is looked up, and of the places where it has occurred those count that go back to the longest equal context.
"""

from __future__ import annotations

from collections.abc import Sequence

LOOKED_UP = (3, 2, 1)
"""Lengths of the contexts that are looked up, tokens."""
CONTEXT = 12
"""Longest context that is compared, tokens."""
PLACES = 8
"""Places kept of a context: the last ones."""
TAKEN_IN = 256
"""Most tokens that one call takes in, about half a millisecond; the others wait for the next calls."""
MOST_TOKENS = 1 << 20
"""Tokens kept, of all prompts together; some 400 bytes each."""

Place = tuple[list[int], int]
"""A text, and the index in it of the token that comes after a context."""


class _Family:
    """The texts of one prompt: the prompt itself with the first response, and the other responses."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, ...], list[Place]] = {}
        self._texts: dict[str, tuple[list[int], list[int]]] = {}
        """Text of each response as far as it was taken in, and the tokens of the prompt with which it begins."""
        self._ended: dict[str, tuple[Sequence[int], Sequence[int]]] = {}
        """Prompt, or its end, and output of responses that have ended and are not whole in their text."""
        self._has_prompt = False

    def count_tokens(self) -> int:
        """Number of tokens, with those that wait to be taken in."""
        ended = sum(len(output) for _, output in self._ended.values())
        return ended + sum(len(text) for text, _ in self._texts.values())

    def take_in(self, name: str, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Take in what is new of the response ``name``, and of those that have ended, as far as one call goes."""
        if name not in self._texts:
            self._texts[name] = [], list(prompt[-CONTEXT:] if self._has_prompt else prompt)
            self._has_prompt = True
        left = self._take_in(name, output, TAKEN_IN)
        while left and self._ended:
            name, (prompt, output) = next(iter(self._ended.items()))
            self._texts.setdefault(name, ([], list(prompt[-CONTEXT:])))
            left = self._take_in(name, output, left)
            if left:
                del self._ended[name]

    def _take_in(self, name: str, output: Sequence[int], most: int) -> int:
        """Take in ``most`` tokens; returns how many fewer they were."""
        text, begin = self._texts[name]
        at = len(text)
        new = begin[at : at + most]
        start = max(at - len(begin), 0)
        new += output[start : start + most - len(new)]
        for token in new:
            for length in LOOKED_UP:
                if len(text) >= length:
                    places = self._places.setdefault(tuple(text[-length:]), [])
                    places.append((text, len(text)))
                    del places[:-PLACES]
            text.append(token)
        return most - len(new)

    def end(self, name: str, prompt: Sequence[int], output: Sequence[int]) -> None:
        self._ended[name] = prompt, output

    def find_next(self, context: list[int]) -> int | None:
        """The token that is expected after ``context``; None if nothing like it was seen."""
        longest, places = self.find_longest(context)
        seen = [text[at] for text, at in places]
        return max(reversed(seen), key=seen.count) if longest else None

    def find_longest(self, context: list[int]) -> tuple[int, list[Place]]:
        """Length of the longest end of ``context`` that was seen before something, and where; 0 and no place if
        none was."""
        for length in LOOKED_UP:
            if len(context) >= length and (places := self._places.get(tuple(context[-length:]))):
                matches = [_count_match(context, text, at) for text, at in places]
                longest = max(matches)
                return longest, [place for place, match in zip(places, matches, strict=True) if match == longest]
        return 0, []


def _get_context(prompt: Sequence[int], output: Sequence[int]) -> list[int]:
    return [*prompt[-CONTEXT:], *output[-CONTEXT:]][-CONTEXT:]


def _count_match(context: list[int], text: list[int], end: int) -> int:
    """Number of tokens before ``text[end]`` that are the last ones of ``context``."""
    most = min(len(context), end)
    for count in range(most):
        if context[-1 - count] != text[end - 1 - count]:
            return count
    return most


def count_right(drafted: Sequence[int], sampled: Sequence[int]) -> int:
    """Number of the first ``drafted`` tokens that are those ``sampled`` in their rows."""
    for count, (draft, token) in enumerate(zip(drafted, sampled, strict=False)):
        if draft != token:
            return count
    return len(drafted)


class Drafter:
    """Drafts for the requests of one replica.

    The ranks of a group must draft alike: each has had the same calls since :meth:`forget`.
    """

    def __init__(self) -> None:
        self._families: dict[int, _Family] = {}
        """Texts by the number of their prompt, those used last at the end."""

    def draft(self, family: int, name: str, prompt: Sequence[int], output: Sequence[int], count: int) -> list[int]:
        """The tokens, ``count`` at most, that are expected next.

        Args:
            family: number of the prompt, the same for all responses to it.
            name: the request's.
            prompt, output: token ids of the prompt, and of the response so far.
        """
        found, context = self._use(family), _get_context(prompt, output)
        found.take_in(name, prompt, output)
        drafted: list[int] = []
        while len(drafted) < count and (token := found.find_next(context)) is not None:
            drafted.append(token)
            context = [*context[1 - CONTEXT :], token]
        return drafted

    def find_match(self, family: int, name: str, prompt: Sequence[int], output: Sequence[int]) -> int:
        """Number of the last tokens, :data:`CONTEXT` at most, that were seen before something in a text of the prompt.

        The larger it is, the more likely drafts are right.  Arguments are those of :meth:`draft`.
        """
        found = self._use(family)
        found.take_in(name, prompt, output)
        return found.find_longest(_get_context(prompt, output))[0]

    def end(self, family: int, name: str, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Keep a response that has ended, for those to the same prompt that have not; of ``prompt`` the last
        :data:`CONTEXT` tokens count."""
        self._use(family).end(name, prompt, output)

    def _use(self, family: int) -> _Family:
        new = family not in self._families
        found = self._families[family] = self._families.pop(family, None) or _Family()
        if new:
            while (
                len(self._families) > 1 and sum(each.count_tokens() for each in self._families.values()) > MOST_TOKENS
            ):
                del self._families[next(iter(self._families))]
        return found

    def forget(self) -> None:
        """Forget all texts: the weights have changed, or the ranks of the group have."""
        self._families.clear()
