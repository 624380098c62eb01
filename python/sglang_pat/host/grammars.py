"""Grammars of SGLang's requests, and the ``BaseGrammarBackend`` that compiles and caches them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from sglang.srt.constrained.base_grammar_backend import BaseGrammarBackend

from sglang_pat.host import adapter
from sglang_pat.host.assign import assign
from sglang_pat.host.requests import Req

Key = tuple[str, str]
"""Kind and text, as SGLang's cache has them."""

Lookup = Callable[[Key, bool], tuple[Any, bool]]
"""Takes a key and whether the request reasons first; gives a grammar, or the future one, and whether it is ready."""

# -- of a request ------------------------------------------------------------------------------------------------------


def get_key(req: Req) -> Key | None:
    """Key under which SGLang caches the grammar of ``req``."""
    params = req.sampling_params
    for kind, value in (
        ("json", params.json_schema),
        ("regex", params.regex),
        (adapter.sampling.get_ebnf_kind(params), params.ebnf),
        ("structural_tag", params.structural_tag),
    ):
        if value is not None:
            return kind, value
    return None


def get_grammar(req: Req) -> Any | None:
    """The grammar of ``req`` as it stands, or the future one; None if it has none."""
    return req.grammar


def set_grammar(req: Req, grammar: Any) -> None:
    assign(req, grammar=grammar)


def is_compiling(req: Req) -> bool:
    """Whether ``req`` is in SGLang's queue for its grammar: on all ranks of a group or on none."""
    return isinstance(req.grammar, Future)


def replay(grammar: Any, tokens: Iterable[int]) -> None:
    """Bring a fresh grammar to where it is on the ranks that had the request, which goes on after all ``tokens``.

    After every token SGLang sets ``finished`` to whether the request is.  An end of sequence that is ignored would
    leave it True here, and ranks of a group would mask different tokens.
    """
    assign(grammar, finished=False)  # once with the check
    for token in tokens:
        grammar.accept_token(token)
        grammar.finished = False


def copy_grammar(grammar: Any) -> Any:
    """A copy in the first state."""
    return grammar.copy()


def begin_reasoning(grammar: Any, reasons: bool) -> None:
    """Tell ``grammar`` whether its request reasons first."""
    grammar.maybe_init_reasoning(reasons)


# -- the backend -------------------------------------------------------------------------------------------------------


def hook_lookup(backend: BaseGrammarBackend, lookup: Lookup) -> Lookup:
    """Have SGLang ask ``lookup`` for the grammars of requests; returns its own."""
    own = backend.get_cached_or_future_value
    assign(backend, get_cached_or_future_value=lookup)
    return own


def compile_grammar(backend: BaseGrammarBackend, key: Key) -> Any:
    return backend._init_value_dispatch(key, False)


def submit(backend: BaseGrammarBackend, function: Callable[..., Any], *args: Any) -> Future:
    """Call ``function`` in SGLang's threads."""
    return backend.executor.submit(function, *args)


def get_cached(backend: BaseGrammarBackend, key: Key) -> Any | None:
    return backend.cache.get(key)


def replace_cache(backend: BaseGrammarBackend, grammars: dict[Key, Any]) -> None:
    """Make ``grammars`` all that the cache holds."""
    backend.reset()
    for key, grammar in grammars.items():
        backend.set_cache(key, grammar)
