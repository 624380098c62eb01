"""Grammars across a switch: those that other groups hand over are compiled before the pause.

A rank keeps the grammars of the requests that it has, with their state.  For those that come from other groups the
coordinator names the grammars (``messages.Compile``), and each rank compiles them while decoding goes on.  A request
that waits for its grammar goes on waiting: what a rank compiles for it survives any number of switches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from sglang_pat.host import grammars
from sglang_pat.host.grammars import Key
from sglang_pat.messages import Grammar

MAX_AWAITED = 64
"""Most grammars that a rank remembers because a request came to it that waits for them: the last ones."""


def list_needed_grammars(reqs: Iterable[Any]) -> list[Grammar]:
    """Compiled grammars of ``reqs``, and the number of requests that have each."""
    compiled = (req for req in reqs if grammars.get_grammar(req) is not None and not grammars.is_compiling(req))
    counts = Counter(key for req in compiled if (key := grammars.get_key(req)) is not None)
    return [Grammar(kind=kind, text=text, count=count) for (kind, text), count in counts.items()]


class CompiledGrammars:
    """Grammars compiled for requests of other groups, in front of SGLang's cache while these are rebuilt.

    They are not in SGLang's cache: a grammar in one rank's cache but not in another's would part their queues.
    """

    def __init__(self, backend: Any | None) -> None:
        self._backend: Any = backend
        self._made: dict[Key, Future] = {}
        self._awaited: dict[Key, Future] = {}
        self._rebuilding: Any = None
        if backend is not None:
            self._sglang_lookup = grammars.hook_lookup(backend, self._lookup)

    def compile(self, jobs: Iterable[Grammar]) -> None:
        """Begin to compile ``jobs``, in SGLang's threads."""
        for grammar in jobs:
            self._begin((grammar.kind, grammar.text), grammar.count)

    @property
    def busy(self) -> bool:
        return not all(future.done() for future in self._made.values())

    def wait(self) -> None:
        """Wait until all are compiled; one that fails says so where it is used."""
        for future in self._made.values():
            future.exception()

    def keep(self, reqs: Iterable[Any]) -> None:
        """Make the grammars of ``reqs``, all requests of a new group, all that SGLang's cache holds.

        The group's ranks must find the same.
        """
        held = (grammars.get_key(req) for req in reqs if grammars.get_grammar(req) is not None)
        keys = {key for key in held if key is not None}
        pristine = {key: self._get_unused(key) for key in keys}
        self.clear()
        if self._backend is not None:
            grammars.replace_cache(self._backend, pristine)

    def clear(self) -> None:
        """Drop what was compiled for a switch."""
        self._made.clear()

    def _get_unused(self, key: Key) -> Any:
        """The grammar for ``key`` that no request uses."""
        if key in self._made:
            return self._made[key].result()[0]
        return grammars.get_cached(self._backend, key) or self._make(key, 0)[0]

    @contextmanager
    def use_for_rebuild(self, held: Any | None, compiling: bool, given_up: bool = False) -> Iterator[None]:
        """Have SGLang, which makes a request again inside the block, find its grammar here.

        Args:
            held: the request's own grammar, or the future one, if the request was here.
            compiling: whether the grammar may not be ready, and waits for its turn.
            given_up: whether the request was aborted and has none any more, maybe because that takes for ever.
        """
        self._rebuilding = held, compiling, given_up
        try:
            yield
        finally:
            self._rebuilding = None

    def _begin(self, key: Key, count: int) -> None:
        if key not in self._made:
            self._made[key] = grammars.submit(self._backend, self._make, key, count)

    def _make(self, key: Key, count: int) -> list[Any]:
        """Make one grammar to keep, and ``count`` to give away: with llguidance each takes as long as the first."""
        first = grammars.compile_grammar(self._backend, key)
        return [first, *(grammars.copy_grammar(first) for _ in range(count))]

    def _take(self, key: Key, require_reasoning: bool) -> Any:
        self._begin(key, 1)
        copies = self._made[key].result()
        grammar = copies.pop() if len(copies) > 1 else grammars.copy_grammar(copies[0])
        grammars.begin_reasoning(grammar, require_reasoning)
        return grammar

    def _lookup(self, key: Key, require_reasoning: bool) -> tuple[Any, bool]:
        """Find a grammar, and whether it is ready; see :meth:`use_for_rebuild`."""
        if self._rebuilding is None:
            return self._sglang_lookup(key, require_reasoning)
        held, compiling, given_up = self._rebuilding
        if held is not None or given_up:
            return held, not compiling
        if not compiling:
            return self._take(key, require_reasoning), True
        if not grammars.get_cached(self._backend, key):
            return self._await(key, require_reasoning), False
        done = Future()
        done.set_result(self._sglang_lookup(key, require_reasoning)[0])
        return done, False

    def _await(self, key: Key, require_reasoning: bool) -> Future:
        """A grammar for one request, when it is compiled: once, however often requests that wait for it come and go."""
        own = Future()
        if key not in self._awaited:
            self._awaited[key] = grammars.submit(self._backend, self._make, key, 0)
            if len(self._awaited) > MAX_AWAITED:
                del self._awaited[next(iter(self._awaited))]
        common = self._awaited[key]

        def give() -> None:
            if not own.set_running_or_notify_cancel():
                return
            try:
                grammar = grammars.copy_grammar(common.result()[0])
                grammars.begin_reasoning(grammar, require_reasoning)
                own.set_result(grammar)
            except Exception as error:
                own.set_exception(error)

        common.add_done_callback(lambda _: grammars.submit(self._backend, give))  # a copy may take as long as the first
        return own
