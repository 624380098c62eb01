"""Grammars: SGLang's llguidance keeps one mask, and fills it row by row."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_pat.host.assign import assign
from sglang_pat.host.fixes.grammars import GuardedGrammar


def get_ebnf_kind(params: SamplingParams) -> str:
    """Kind of a grammar in EBNF, as SGLang's cache has it."""
    return "ebnf"


def guard_grammar(grammar: Any) -> GuardedGrammar:
    """A guard in front of ``grammar``, for one step."""
    return GuardedGrammar(grammar)


def forget_masks(reqs: list[Req]) -> None:
    """Have the grammars of ``reqs`` make their vocabulary masks anew in the next step (docs/upstream/grammars.md).

    SGLang's llguidance backend (our choice on a CPU) keeps one mask from step to step and fills the
    rows of constrained requests only: once rows move up, a free request would inherit another's mask.
    """
    for req in reqs:
        grammar = getattr(req.grammar, "grammar", req.grammar)  # what a reasoning wrapper holds
        if getattr(grammar, "bitmask", None) is not None:
            assign(grammar, bitmask=None)
