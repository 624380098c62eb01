"""A training job's state as bytes: its rules, and what the admitter knows."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from sglang_pat.rollout.admitter import Admitter
from sglang_pat.rollout.records import Group
from sglang_pat.rollout.rules import Rules
from sglang_pat.rollout.state import State

VERSION = 2


class Header(msgspec.Struct):
    """What states of all versions have."""

    version: int


class Saved(msgspec.Struct, kw_only=True):
    """A job."""

    version: int
    rules: Rules
    state: State


EMPTY = b'"fresh":[],"waiting":[]'
"""How the groups of a state without any are encoded."""


def dumps(admitter: Admitter) -> bytes:
    """JSON of all that the admitter knows, a round under way included."""
    return b"".join(pieces(admitter.rules, admitter.state))


def pieces(rules: Rules, state: State) -> Iterator[bytes]:
    """The same in pieces, one for each group that waits: to encode all tokens at once would hold up other threads."""
    without = msgspec.structs.replace(state, fresh=[], waiting=[])
    saved = Saved(version=VERSION, rules=rules, state=without)
    # What comes before it are numbers, and names that are known.
    before, after = msgspec.json.encode(saved).split(EMPTY, 1)
    yield before + b'"fresh":['
    yield from _listed(state.fresh)
    yield b'],"waiting":['
    yield from _listed(state.waiting)
    yield b"]" + after


def _listed(groups: list[Group]) -> Iterator[bytes]:
    for place, group in enumerate(groups):
        yield b"," * bool(place) + msgspec.json.encode(group)


def decode(data: bytes, source: str = "saved admitter") -> Saved:
    """What :func:`dumps` gave.

    Raises:
        ValueError: one line: not such a state, or of another version.
    """
    try:
        version = msgspec.json.decode(data, type=Header).version
        if version != VERSION:
            raise ValueError(f"{source}: version {version}, this is version {VERSION}; finish its epoch there")
        saved = msgspec.json.decode(data, type=Saved)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{source}: not the state of an admitter ({error})") from None
    if saved.rules.mode == "partial":
        for group in (*saved.state.waiting, *(saved.state.round.everyone if saved.state.round else ())):
            group.oldest = group.oldest_token()  # older files do not have it
    return saved


def loads(data: bytes, rules: Rules | None = None, source: str = "saved admitter") -> Admitter:
    """``rules``: in place of the saved ones, see :func:`check_rules`.

    A round under way is still under way: for the process that drives it.  Another one needs :func:`restored`.

    Raises:
        ValueError: one line: as :func:`decode` and :func:`check_rules`.
    """
    return _admitter(decode(data, source), rules, source)


def restored(saved: Saved, rules: Rules | None = None, source: str = "saved admitter") -> Admitter:
    """In another process: a round that was under way is given up, no engine has it any more.

    Raises:
        ValueError: as :func:`check_rules`.
    """
    admitter = _admitter(saved, rules, source)
    admitter.engine_lost()
    return admitter


def _admitter(saved: Saved, rules: Rules | None, source: str) -> Admitter:
    if rules is not None:
        check_rules(saved.rules, rules, saved.state, source)
    return Admitter(rules or saved.rules, saved.state)


def check_rules(old: Rules, new: Rules, state: State, source: str) -> None:
    """Raises ValueError: what was begun under the old rules cannot go on under the new ones.

    The mode must be the same, and in ``partial`` the size of groups while some are half done.
    """
    if new.mode != old.mode:
        raise ValueError(f"mode is {new.mode!r}, {source} is of mode {old.mode!r}; give another one")
    # As many as the groups have, and not as the old rules say: the state may be an earlier one.
    was = next((len(g.samples) for g in state.waiting if g.samples and len(g.samples) != new.num_responses), 0)
    if new.mode == "partial" and was:
        raise ValueError(f"num_responses is {new.num_responses}, {source} has groups of {was} half done; finish them")
