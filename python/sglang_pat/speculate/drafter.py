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
"""Most tokens that are taken in for a step, of all requests together: half a millisecond.  The others wait for the
next steps: after a switch, some thousands of each request."""
MOST_TOKENS = 1 << 20
"""Tokens kept, of all prompts together; some 400 bytes each."""

Place = tuple[list[int], int]
"""A text, and the index in it of the token that comes after a context."""


class _Family:
    """The texts of one prompt: the prompt itself with the first response, and the other responses."""

    def __init__(self) -> None:
        self.tokens = 0
        """Number of tokens, with those that wait to be taken in, and :data:`CONTEXT` for each text."""
        self._places: dict[tuple[int, ...], list[Place]] = {}
        self._texts: dict[str, tuple[list[int], list[int]]] = {}
        """Text of each response as far as it was taken in, and the tokens of the prompt with which it begins."""
        self._ended: dict[str, tuple[Sequence[int], Sequence[int]]] = {}
        """End of the prompt, and output, of responses that have ended and are not whole in their text."""
        self._has_prompt = False

    def take_in(self, name: str, prompt: Sequence[int], output: Sequence[int], most: int) -> int:
        """Take in what is new of the response ``name``, and of those that have ended; returns how many tokens fewer
        than ``most`` these were."""
        if name not in self._texts:
            self._begin(name, prompt[-CONTEXT:] if self._has_prompt else prompt)
            self._has_prompt = True
        left = self._take_in(name, output, most)
        while left and self._ended:
            name, (prompt, output) = next(iter(self._ended.items()))
            if name not in self._texts:
                self._begin(name, prompt)
            left = self._take_in(name, output, left)
            if left:
                del self._ended[name]
                self.tokens -= len(output)
        return left

    def _begin(self, name: str, prompt: Sequence[int]) -> None:
        self._texts[name] = [], list(prompt)
        self.tokens += CONTEXT

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
        self.tokens += len(new)
        return most - len(new)

    def end(self, name: str, prompt: Sequence[int], output: Sequence[int]) -> None:
        _, replaced = self._ended.pop(name, ((), ()))
        self._ended[name] = prompt[-CONTEXT:], output
        self.tokens += len(output) - len(replaced)

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
        self._tokens = 0
        self._left = TAKEN_IN

    def begin_step(self) -> None:
        """Note that a step is about to be drafted for: some more tokens are taken in."""
        self._left = TAKEN_IN

    def draft(self, family: int, name: str, prompt: Sequence[int], output: Sequence[int], count: int) -> list[int]:
        """The tokens, ``count`` at most, that are expected next.

        Args:
            family: number of the prompt, the same for all responses to it.
            name: the request's.
            prompt, output: token ids of the prompt, and of the response so far.
        """
        texts, context = self._take_in(family, name, prompt, output), _get_context(prompt, output)
        drafted: list[int] = []
        while len(drafted) < count and (token := texts.find_next(context)) is not None:
            drafted.append(token)
            context = [*context[1 - CONTEXT :], token]
        return drafted

    def find_match(self, family: int, name: str, prompt: Sequence[int], output: Sequence[int]) -> int:
        """Number of the last tokens, :data:`CONTEXT` at most, that were seen before something in a text of the prompt.

        The larger it is, the more likely drafts are right.  Arguments are those of :meth:`draft`.
        """
        texts = self._take_in(family, name, prompt, output)
        return texts.find_longest(_get_context(prompt, output))[0]

    def _take_in(self, family: int, name: str, prompt: Sequence[int], output: Sequence[int]) -> _Family:
        texts = self._use(family)
        before = texts.tokens
        self._left = texts.take_in(name, prompt, output, self._left)
        self._tokens += texts.tokens - before
        return texts

    def end(self, family: int, name: str, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Keep a response that has ended, for those to the same prompt that have not; of ``prompt`` the last
        :data:`CONTEXT` tokens count."""
        texts = self._use(family)
        before = texts.tokens
        texts.end(name, prompt, output)
        self._tokens += texts.tokens - before

    def _use(self, family: int) -> _Family:
        """Texts of a prompt.  If too much is kept, those of the prompts that were not used for longest go; at last all
        of this one, which begins anew."""
        self._families[family] = self._families.pop(family, None) or _Family()
        while self._tokens > MOST_TOKENS:
            dropped = self._families.pop(next(iter(self._families)))
            self._tokens -= dropped.tokens
        return self._families.setdefault(family, _Family())

    def forget(self) -> None:
        """Forget all texts: the weights have changed, or the ranks of the group have."""
        self._families.clear()
        self._tokens, self._left = 0, TAKEN_IN
