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

from sglang.srt.constrained.base_grammar_backend import BaseGrammarBackend
from sglang.srt.managers.schedule_batch import Req

from sglang_pat.messages import Grammar

Key = tuple[str, str]
"""Kind and text, as SGLang's cache has them."""

MAX_AWAITED = 64
"""Grammars that a rank remembers because a request came to it that waits for them: the last ones."""


def get_key(req: Req) -> Key | None:
    """Key under which SGLang caches the grammar of ``req``."""
    params = req.sampling_params
    for kind, value in (
        ("json", params.json_schema),
        ("regex", params.regex),
        ("ebnf", params.ebnf),
        ("structural_tag", params.structural_tag),
    ):
        if value is not None:
            return kind, value
    return None


def is_compiling(req: Req) -> bool:
    """Whether ``req`` is in SGLang's queue for its grammar: on all ranks of a group or on none."""
    return isinstance(req.grammar, Future)


def list_needed_grammars(reqs: Iterable[Req]) -> list[Grammar]:
    """The compiled grammars of ``reqs`` and how many requests have each."""
    keys = (get_key(req) for req in reqs if req.grammar is not None and not is_compiling(req))
    counts = Counter(key for key in keys if key is not None)
    return [Grammar(kind=kind, text=text, count=count) for (kind, text), count in counts.items()]


def replay(grammar: Any, tokens: Iterable[int]) -> None:
    """Bring a fresh grammar to where it is on the ranks that had the request, which goes on after all ``tokens``.

    After every token SGLang sets ``finished`` to whether the request is.  An end of sequence that is ignored would
    leave it True here, and ranks of a group would mask different tokens.
    """
    for token in tokens:
        grammar.accept_token(token)
        grammar.finished = False


class CompiledGrammars:
    """What a rank has compiled for requests of other groups; stands in front of SGLang's cache while requests are
    rebuilt.

    Not SGLang's cache itself: a grammar in one rank's cache but not in another's would part their queues.
    """

    def __init__(self, backend: BaseGrammarBackend | None) -> None:
        self._backend = backend
        self._made: dict[Key, Future] = {}
        self._awaited: dict[Key, Future] = {}
        self._rebuilding: Any = None
        if backend is not None:
            self._sglang_lookup = backend.get_cached_or_future_value
            backend.get_cached_or_future_value = self._lookup

    def compile(self, wanted: Iterable[Grammar]) -> None:
        """Begin to compile, in SGLang's threads."""
        for grammar in wanted:
            self._begin((grammar.kind, grammar.text), grammar.count)

    @property
    def busy(self) -> bool:
        return not all(made.done() for made in self._made.values())

    def wait(self) -> None:
        """Until all are compiled; one that fails says so where it is used."""
        for made in self._made.values():
            made.exception()

    def keep(self, reqs: Iterable[Req]) -> None:
        """Have the grammars of ``reqs``, which are all of a new group's, in SGLang's cache, and no others: its ranks
        must find the same."""
        keys = {get_key(req) for req in reqs if req.grammar is not None} - {None}
        pristine = {key: self._get_unused(key) for key in keys}
        self.clear()
        if self._backend is not None:
            self._backend.reset()
            for key, grammar in pristine.items():
                self._backend.set_cache(key, grammar)

    def clear(self) -> None:
        """What was compiled for a switch is not wanted any more."""
        self._made.clear()

    def _get_unused(self, key: Key) -> Any:
        """One that no request uses."""
        if key in self._made:
            return self._made[key].result()[0]
        return self._backend.cache.get(key) or self._make(key, 0)[0]

    @contextmanager
    def use_for_rebuild(self, held: Any | None, compiling: bool, given_up: bool = False) -> Iterator[None]:
        """Inside the block SGLang makes a request again: with the grammar ``held`` by the request itself, or the future
        one, if it was here; ``compiling``: with one that may not be ready and waits for its turn; ``given_up``: it was
        aborted and has none any more, maybe because that takes for ever."""
        self._rebuilding = held, compiling, given_up
        try:
            yield
        finally:
            self._rebuilding = None

    def _begin(self, key: Key, count: int) -> None:
        if key not in self._made:
            self._made[key] = self._backend.executor.submit(self._make, key, count)

    def _make(self, key: Key, count: int) -> list[Any]:
        """One to keep, and ``count`` to give away: with llguidance each takes as long as the first."""
        first = self._backend._init_value_dispatch(key, False)
        return [first, *(first.copy() for _ in range(count))]

    def _take(self, key: Key, require_reasoning: bool) -> Any:
        self._begin(key, 1)
        made = self._made[key].result()
        grammar = made.pop() if len(made) > 1 else made[0].copy()
        grammar.maybe_init_reasoning(require_reasoning)
        return grammar

    def _lookup(self, key: Key, require_reasoning: bool) -> tuple[Any, bool]:
        """SGLang's, and whether it is ready; see :meth:`use_for_rebuild`."""
        if self._rebuilding is None:
            return self._sglang_lookup(key, require_reasoning)
        held, compiling, given_up = self._rebuilding
        if held is not None or given_up:
            return held, not compiling
        if not compiling:
            return self._take(key, require_reasoning), True
        if not self._backend.cache.get(key):
            return self._await(key, require_reasoning), False
        done = Future()
        done.set_result(self._sglang_lookup(key, require_reasoning)[0])
        return done, False

    def _await(self, key: Key, require_reasoning: bool) -> Future:
        """A grammar for one request, when it is compiled: once, however often requests that wait for it come and go."""
        executor, own = self._backend.executor, Future()
        if key not in self._awaited:
            self._awaited[key] = executor.submit(self._make, key, 0)
            if len(self._awaited) > MAX_AWAITED:
                del self._awaited[next(iter(self._awaited))]
        common = self._awaited[key]

        def give() -> None:
            if not own.set_running_or_notify_cancel():
                return
            try:
                grammar = common.result()[0].copy()
                grammar.maybe_init_reasoning(require_reasoning)
                own.set_result(grammar)
            except Exception as error:
                own.set_exception(error)

        common.add_done_callback(lambda _: executor.submit(give))  # a copy may take as long as the first
        return own
