"""The requests of a group across a switch: found with their KV, offered to the new groups, and rebuilt there.

A request travels as a capsule (:class:`Capsule`).  What that holds of SGLang's ``Req`` is in ``host/requests.py``.
"""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from sglang_pat.host import grammars, kv, loop, tree
from sglang_pat.host import requests as host
from sglang_pat.host.requests import Req
from sglang_pat.layout import ParallelLayout, needs_capsules
from sglang_pat.messages import NO_KV, Grammar
from sglang_pat.rank.degrees import Degrees
from sglang_pat.rank.draft_model import Learnt
from sglang_pat.rank.speculation import Drafts
from sglang_pat.speculate.acceptance import Acceptance
from sglang_pat.switch import plan
from sglang_pat.switch.grammars import list_needed_grammars
from sglang_pat.switch.transfer import download

if TYPE_CHECKING:
    from sglang_pat.switch.scheduler import SwitchingScheduler


# -- those of a group ----------------------------------------------------------------------------------


def is_engine_idle(scheduler: SwitchingScheduler) -> bool:
    """Whether no rank of the engine has a request; all ranks call this."""
    idle = torch.tensor([int(loop.is_idle(scheduler))])
    dist.all_reduce(idle, dist.ReduceOp.MIN, group=scheduler.layouts.groups.world)
    return bool(idle.item())


def split_by_kv(scheduler: SwitchingScheduler) -> tuple[list[Req], list[Req], list[np.ndarray]]:
    """``(live, waiting, rows)`` after a drain: requests that have KV, decoding ones first, and the others.

    ``rows``: KV slots of the tokens of each live one, int64 ``[tokens]``; the last token has none yet.  Of those that
    do not decode some may have fewer: only some pieces of a prompt are computed, or some KV was evicted.
    """
    decoding, waiting = loop.list_requests(scheduler)
    parked = _list_parked(scheduler)
    parked_ids = {id(req) for req, _ in parked}
    rows = read_kv_rows(scheduler, decoding, [slots for _, slots in parked])
    return decoding + [req for req, _ in parked], [req for req in waiting if id(req) not in parked_ids], rows


def list_decoded_waiting(scheduler: SwitchingScheduler) -> list[Req]:
    """Requests that decoded and wait now: parked by a switch, or retracted."""
    return [req for req in loop.list_queued(scheduler) if host.get_output(req)]


def can_keep_pieces(scheduler: SwitchingScheduler) -> bool:
    """Whether the computed pieces of a prompt go over: KV moves, and there is a tree to wait in."""
    return scheduler.adaptive.kv != "recompute" and tree.keeps_kv(scheduler)


def _list_parked(scheduler: SwitchingScheduler) -> list[tuple[Req, torch.Tensor]]:
    """Requests that wait and have KV, with its slots: those that decoded first, then prompts in pieces.

    An earlier switch has left it in the radix tree (``install.py``), where some may have been lost to others that
    decode; the prompt whose pieces are being computed holds its own.  Who has decoded has none in a pause by a client:
    one that has retracted all requests promises that no KV is in use, so that weights can be updated and the tree
    emptied.
    """
    if not tree.keeps_kv(scheduler):
        return []
    waiting = [] if scheduler._paused_by_client else list_decoded_waiting(scheduler)
    waiting += [req for req in loop.list_queued(scheduler) if host.is_in_pieces(req)]
    pairs: list[tuple[Req, torch.Tensor]] = []
    for req in waiting:
        if len(slots := tree.find_kv(scheduler, req)):
            pairs.append((req, slots))
    if (chunked := loop.get_chunked(scheduler)) is not None:
        pairs.append((chunked, kv.read_line(scheduler, chunked)))
    return pairs


def read_kv_rows(scheduler: SwitchingScheduler, decoding: list[Req], parked: list[torch.Tensor]) -> list[np.ndarray]:
    """KV slots of the tokens of each request, int64 ``[tokens]``; one read of the device for each list."""
    rows = kv.read_rows(scheduler, decoding) if decoding else []
    if parked:
        ends = np.cumsum([len(slots) for slots in parked])
        rows += np.split(download(torch.cat(parked)).astype(np.int64), ends[:-1])
    return rows


def recompute_all(scheduler: SwitchingScheduler) -> None:
    """Send every request back to the queue as tokens, and empty the pools: their KV may have been overwritten."""
    decoding, waiting = loop.list_requests(scheduler)
    for req in decoding + ([chunked] if (chunked := loop.get_chunked(scheduler)) is not None else []):
        kv.lose_kv(req)
    compiling = loop.list_compiling(scheduler)
    kv.clear_pools(scheduler)
    loop.set_requests(scheduler, decoding + [req for req in waiting if req not in compiling], compiling)


# -- one request, as a capsule -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UnsentLogprobs:
    """One list of logprobs: the number of its entries that were sent, which do not go over, and the others."""

    sent: int
    entries: list[Any]


@dataclass
class Capsule:
    """One request on its way to new ranks: as it came in, and everything that has happened to it since.

    Attributes:
        sealed: the tokenized request as the TokenizerManager sent it, and its prompt (:func:`pickle_request`).
        output: token ids, unsigned 32 bit.  As an array: pickling a list takes a step for each token.
        state: SGLang's state of it, but for its output; lists of logprobs that are not empty as
            :class:`UnsentLogprobs`.
        times: numeric fields of SGLang's time stats (seconds of this machine's clock).
        ending: whether it ends with its next step, as it was aborted.
        compiling: whether it waits for its grammar; ``constrained``: whether it has one, which may be to come.
        degrees: TP degrees that generated its tokens (``rank/degrees.py``).
        drafts: how many were drafted (``rank/speculation.py``); ``learnt``: what the trained drafter knows of it.
        experts: routed experts of its tokens, if it was retracted and takes them along; else None.
    """

    sealed: bytes
    output: array
    state: dict[str, Any]
    times: dict[str, float]
    ending: bool
    compiling: bool
    constrained: bool
    degrees: Degrees
    drafts: Drafts
    learnt: Learnt | None
    experts: torch.Tensor | None


def pickle_request(req: Req) -> bytes:
    """Pickle what never changes in ``req``, on first use: before the pause, in PREPARE.

    ``req.pat_request`` and ``req.pat_prompt`` were attached by the adaptive scheduler when the request came in.
    """
    if req.pat_sealed is None:
        req.pat_sealed = host.seal(req.pat_request, req.pat_prompt)
    return req.pat_sealed


def serialize_request(req: Req, learnt: Learnt | None = None) -> Capsule:
    """Make the capsule of ``req``, which is not touched but for its seal."""
    output, state = host.read_state(req, req.pat_request)
    for name in host.LOGPROBS:
        if entries := state.get(name):
            sent = host.count_sent_logprobs(req, name, len(entries))
            state[name] = UnsentLogprobs(sent, entries[sent:])
    return Capsule(
        sealed=pickle_request(req),
        output=output,
        state=state,
        times=host.read_times(req),
        ending=host.get_pending_end(req) is not None,
        compiling=grammars.is_compiling(req),
        constrained=grammars.get_grammar(req) is not None,
        degrees=req.pat_degrees,
        drafts=req.pat_drafts,
        learnt=learnt,
        experts=getattr(req, "pat_experts", None),
    )


def restore_state(req: Req, capsule: Capsule) -> None:
    """Give a fresh ``Req`` (made from what ``capsule`` seals) the state it had before the switch."""
    state = dict(capsule.state)
    for name in host.LOGPROBS:
        if isinstance(logprobs := state.get(name), UnsentLogprobs):
            # Those that were sent keep their places, by which SGLang finds the others.
            state[name] = [None] * logprobs.sent + logprobs.entries
    host.write_state(req, capsule.output, state, capsule.times)
    req.pat_degrees, req.pat_drafts = capsule.degrees, capsule.drafts
    req.pat_experts = capsule.experts


def rebuild_request(scheduler: SwitchingScheduler, capsule: Capsule, held_grammar: Any | None = None) -> Req:
    """Make a ``Req`` of this scheduler, in the state in which ``capsule`` found it.

    ``held_grammar``: its grammar as it stands, or the future one, if it was here before.
    """
    message, prompt = host.unseal(capsule.sealed)
    # In the queue an abort takes the grammar away; one that runs keeps it, on all ranks of its group or on none.
    given_up = capsule.ending and not capsule.constrained
    with scheduler.grammars.use_for_rebuild(held_grammar, capsule.compiling, given_up):
        req = scheduler.construct(message, prompt, capsule.sealed)
    if held_grammar is not None:
        grammars.set_grammar(req, held_grammar)  # also one that no text asks for (strict thinking)
    refused = host.get_pending_end(req)
    restore_state(req, capsule)
    if refused is not None and host.get_pending_end(req) is None:
        # Its grammar turned out not to compile.
        host.abort(req, refused)
    return req


# -- from the old groups to the new ones ----------------------------------------------------------------


@dataclass
class GroupOffer:
    """The requests of one old group, offered by its leader.

    Attributes:
        live: the plan's view of the requests that have KV: those that decode in batch order, then those that wait for a
            decode slot or for the rest of a prefill.
        waiting: destination group of each request that waits for a prefill.
        capsules: destination group -> bytes of its requests' capsules, pickled together, live ones first; only of
            groups with ranks that do not hold these requests already, which get them from this leader.
        sent: number of outputs that this leader has sent so far (``sglang_pat.switch.order``).
        fence: the fence that its next output would have carried.
        weight_version: number of weight updates this rank has applied.
        entered: time when each request came into the queue, by the leader's clock; live ones first.
        taken: values that ranks of a new group take over from their leader (``loop.COUNTERS``); ``acceptance``: how
            often its drafts were right, likewise.
    """

    live: list[plan.LiveRequest] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    capsules: dict[int, int] = field(default_factory=dict)
    sent: int = 0
    fence: dict[int, int] | None = None
    weight_version: int = 0
    entered: list[float] = field(default_factory=list)
    taken: dict[str, Any] = field(default_factory=dict)
    acceptance: Acceptance | None = None


@dataclass
class IncomingRequests:
    """Requests of this rank's new group, rebuilt.

    Attributes:
        decoding: request, its slots in the plan (int64 ``[tokens]``), and the number of slots that it shares with an
            earlier one.
        waiting: requests that start with a prefill.
        parked: waiting requests whose KV came along, as in ``decoding``.
        learnt: what the trained drafter knows of those that decode and that this rank did not have, by name.
        place: slot of the new pool view for each slot of the plan, int64 ``[num_slots + 1]``.
        entered: rid -> when it came into the queue, of those that this rank held: their leader's clock counts, since
            priority scheduling sorts by it.
    """

    decoding: list[tuple[Req, np.ndarray, int]] = field(default_factory=list)
    waiting: list[Req] = field(default_factory=list)
    parked: list[tuple[Req, np.ndarray, int]] = field(default_factory=list)
    learnt: dict[str, Learnt] = field(default_factory=dict)
    place: np.ndarray = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    entered: dict[str, float] = field(default_factory=dict)

    @property
    def num_slots(self) -> int:
        """Number of KV slots in use."""
        return len(self.place) - 1

    @property
    def recomputed(self) -> list[Req]:
        """Requests that decoded and lost their KV."""
        parked = {host.get_name(req) for req, _, _ in self.parked}
        return [req for req in self.waiting if host.get_output(req) and host.get_name(req) not in parked]


def compute_least_moved(scheduler: SwitchingScheduler, recompute_below: int) -> int:
    """Least number of KV tokens with which a request is moved, by ``--pat-kv`` and a command's ``recompute_below``."""
    return (
        NO_KV if recompute_below == NO_KV else {"migrate": 0, "auto": recompute_below}.get(scheduler.adaptive.kv, NO_KV)
    )


GROWTH = 16
"""Number of tokens that a request may still get between PREPARE and the pause, for which memory is taken before."""


def count_tokens_to_move(scheduler: SwitchingScheduler, recompute_below: int = 0) -> int:
    """Number of KV tokens, about, that a switch would move if it came now; ``recompute_below``: the command's."""
    lengths = [kv.count_kv(req) + GROWTH for req in loop.list_running(scheduler)]
    lengths += [host.count_tokens(req) for req in list_decoded_waiting(scheduler)]
    least = compute_least_moved(scheduler, recompute_below)
    tokens = sum(length for length in lengths if length >= least)
    if (prompt := loop.get_chunked(scheduler)) is not None and least != NO_KV and can_keep_pieces(scheduler):
        tokens += min(kv.count_kv(prompt) + loop.get_chunk_size(scheduler), host.count_tokens(prompt))
    return tokens


def seal_requests(scheduler: SwitchingScheduler, new: ParallelLayout) -> list[Grammar]:
    """Pickle, before the pause, what never changes in this group's requests, if it is going to travel.

    Returns:
        Grammars that the ranks of other groups will need.
    """
    if not scheduler.is_leader or not needs_capsules(scheduler.layouts.layout, new):
        return []
    reqs = loop.list_running(scheduler) + loop.list_queued(scheduler)
    for req in reqs:
        pickle_request(req)
    return list_needed_grammars(reqs)


def make_offer(
    scheduler: SwitchingScheduler,
    new: ParallelLayout,
    live: list[Req],
    waiting: list[Req],
    rows: list[np.ndarray],
    recompute_below: int,
) -> tuple[GroupOffer, dict[int, bytes]]:
    """Make this group's offer; all ranks of a group compute the same, and its leader adds the capsules.

    Args:
        rows: KV slots of the live requests, int64 ``[tokens]`` each.
        recompute_below: the command's; but of requests in the middle of a prefill: where switches come often, each
            piece would be lost before the next one.
    """
    layouts = scheduler.layouts
    old = layouts.layout
    own = old.group_of(scheduler.rank)
    tokens = [host.count_tokens(req) for req in live + waiting]
    complete = [
        bool(host.get_output(req)) and len(row) == length - 1
        for req, row, length in zip(live, rows, tokens[: len(live)], strict=True)
    ]
    lengths = [length - done for length, done in zip(tokens, complete + [False] * len(waiting), strict=True)]
    least = compute_least_moved(scheduler, recompute_below)
    of_pieces = least if least == NO_KV else 0
    rows = [
        row if len(row) >= (least if done else of_pieces) else row[:0] for row, done in zip(rows, complete, strict=True)
    ]
    dests = plan.choose_destinations(old, new, own, lengths)
    live_dest = dests[: len(live)]
    shared = plan.find_shared_prefixes(rows, live_dest, layouts.current.capacity + 1)
    planned = [
        plan.LiveRequest(len(row), *pair, dest, done)
        for row, pair, dest, done in zip(rows, shared, live_dest, complete, strict=True)
    ]
    capsules: dict[int, bytes] = {}
    if scheduler.is_leader and needs_capsules(old, new):
        bound: dict[int, list[Capsule]] = {}
        travels = [new.tp > old.tp or dest != own for dest in dests]  # else nobody lacks it
        learnt = scheduler.speculation.read_learnt([req for req, goes in zip(live, travels, strict=False) if goes])
        for req, dest, goes in zip(live + waiting, dests, travels, strict=True):
            if goes:
                bound.setdefault(dest, []).append(serialize_request(req, learnt.get(host.get_name(req))))
        capsules = {dest: pickle.dumps(batch, pickle.HIGHEST_PROTOCOL) for dest, batch in bound.items()}
    output = scheduler.output
    offer = GroupOffer(
        planned,
        dests[len(live) :],
        {dest: len(data) for dest, data in capsules.items()},
        output.sent,
        output.fence,
        layouts.weight_version,
        [host.get_entry_time(req) for req in live + waiting],
    )
    return offer, capsules


def send_capsules(
    scheduler: SwitchingScheduler, new: ParallelLayout, offers: dict[int, GroupOffer], capsules: dict[int, bytes]
) -> dict[int, bytes]:
    """Send capsules from the leaders to the ranks that need them, and to no other; all ranks take part.

    Args:
        capsules: those that this rank sends, by destination group; empty unless it leads.

    Returns:
        Capsules that come to this rank, by source group.
    """
    old, rank = scheduler.layouts.layout, scheduler.rank
    sends = plan.list_capsules_to_send(old, new, rank, capsules)
    comes = plan.list_capsule_sizes(old, new, rank, {source: offer.capsules for source, offer in offers.items()})
    outgoing = torch.from_numpy(np.frombuffer(bytearray().join(sends), dtype=np.uint8))
    received = torch.empty(sum(comes), dtype=torch.uint8)
    world = scheduler.layouts.groups.world
    dist.all_to_all_single(received, outgoing, comes, [len(data) for data in sends], group=world)
    parts = torch.split(received, comes)
    return {source: parts[old.leaders[source]].numpy().tobytes() for source in offers if comes[old.leaders[source]]}


def plan_groups(
    scheduler: SwitchingScheduler, new: ParallelLayout, offers: dict[int, GroupOffer]
) -> dict[int, plan.GroupPlan]:
    """The plan of every new group that a member of this rank's exchange group will belong to."""
    layouts = scheduler.layouts
    _, members = layouts.groups.exchange_group(layouts.layout, new)
    sources: dict[int, Sequence[plan.LiveRequest]] = {group: offer.live for group, offer in offers.items()}
    most, capacity, keep = kv.count_lines(scheduler), layouts[new].capacity, tree.keeps_kv(scheduler)
    return {g: plan.plan_group(g, sources, most, capacity, keep) for g in {new.group_of(m) for m in members}}


def rebuild_requests(
    scheduler: SwitchingScheduler,
    new: ParallelLayout,
    group_plan: plan.GroupPlan,
    offers: dict[int, GroupOffer],
    capsules: dict[int, bytes],
    held: list[Req],
    place: np.ndarray,
) -> IncomingRequests:
    """Rebuild the requests that come to this rank's new group, decoding ones in plan order.

    Those that decode before and after, and that this rank ``held`` (live ones first, as in its own group's offer), go
    on as they are: all ranks of a group keep the same account of a request.  The others are rebuilt.  Nothing of what
    is held is changed here, so that an aborted switch goes on with it.
    """
    new_group = new.group_of(scheduler.rank)
    own = scheduler.layouts.layout.group_of(scheduler.rank)
    incoming = IncomingRequests(place=place)
    recompute: list[Req] = []
    queued: list[Req] = []
    for group, offer in offers.items():
        if group == own:
            dests = [live.dest for live in offer.live] + offer.waiting
            coming = iter([req for req, dest in zip(held, dests, strict=True) if dest == new_group])
            incoming.entered = {host.get_name(req): at for req, at in zip(held, offer.entered, strict=True)}
        else:
            coming = iter(pickle.loads(capsules[group]) if group in capsules else ())
        planned = zip(offer.live, group_plan.rows[group], group_plan.decodes[group], strict=True)
        for live, row, decodes in planned:
            if live.dest != new_group:
                continue
            arrival = next(coming)
            goes_on = decodes and isinstance(arrival, Req) and kv.get_line(arrival) is not None
            req = arrival if goes_on else _rebuild_one(scheduler, arrival)
            if decodes and isinstance(arrival, Capsule) and arrival.learnt is not None:
                incoming.learnt[host.get_name(req)] = arrival.learnt
            if not decodes:
                recompute.append(req)
            if row is not None:
                where = incoming.decoding if decodes else incoming.parked
                where.append((req, row, live.shared))
        queued += [_rebuild_one(scheduler, one) for one in coming]
    # Those that were already running go first, as SGLang does with retracted ones.
    incoming.waiting = recompute + queued
    return incoming


def _rebuild_one(scheduler: SwitchingScheduler, one: Capsule | Req) -> Req:
    if not isinstance(one, Req):
        req = rebuild_request(scheduler, one)
        if (grammar := grammars.get_grammar(req)) is not None and not one.compiling:
            grammars.replay(grammar, host.get_output(req))
        return req
    return rebuild_request(scheduler, serialize_request(one), held_grammar=grammars.get_grammar(one))
