"""The requests of a group across a switch: taken out of SGLang's loop, offered to the new groups, and rebuilt there.

In this order below.  A request travels as a capsule (:class:`Capsule`): the tokenized request as it came in, plus
everything that has happened to it since.  The contract test knows every attribute of SGLang's ``Req``, and which of
them the receiving rank makes anew: one that is neither among them nor in :data:`CARRIED` fails there by name.
"""

from __future__ import annotations

import copy
import pickle
import re
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_pat.layout import ParallelLayout, needs_capsules
from sglang_pat.messages import NO_KV, Grammar
from sglang_pat.rank.degrees import Degrees
from sglang_pat.switch import grammars, plan
from sglang_pat.switch.transfer import download, upload

if TYPE_CHECKING:
    from sglang_pat.switch.scheduler import SwitchingScheduler


# -- out of SGLang's loop ---------------------------------------------------------------------------------


def drain(scheduler: SwitchingScheduler) -> None:
    """Finish the step in flight and leave all decoding requests in ``running_batch``.

    Keeps everything valid, so that an aborted switch just goes on.
    """
    while scheduler.enable_overlap and scheduler.result_queue:
        scheduler.process_batch_result(*scheduler.result_queue.popleft())
    last = scheduler.last_batch
    if last is not None and last.forward_mode.is_extend():
        last.filter_batch(chunked_req_to_exclude=[r for r in (scheduler.chunked_req, last.chunked_req) if r])
        if not last.is_empty():
            if scheduler.running_batch.is_empty():
                scheduler.running_batch = last
            else:
                scheduler.running_batch.merge_batch(last)
    scheduler.last_batch = scheduler.cur_batch = None
    scheduler.running_batch.filter_batch()
    # SGLang looks for room again where its own code shrinks this batch, and never again if it is empty.
    scheduler.running_batch.batch_is_full = False
    while scheduler.return_health_check_ipcs:
        scheduler.maybe_send_health_check_signal()


def drop_ended_batch(scheduler: SwitchingScheduler) -> None:
    """Let go of the requests in a batch if all have ended in the last step.

    They have been answered, and SGLang would count them up to its next turn: what is to come when nothing runs would
    fail before.
    """
    batches = [batch for batch in (scheduler.running_batch, scheduler.last_batch) if batch is not None]
    if any(batch.reqs for batch in batches) and all(req.finished() for batch in batches for req in batch.reqs):
        drain(scheduler)


def is_engine_idle(scheduler: SwitchingScheduler) -> bool:
    """Whether no rank of the engine has a request; all of them call this."""
    idle = torch.tensor([int(scheduler.is_fully_idle())])
    dist.all_reduce(idle, dist.ReduceOp.MIN, group=scheduler.layouts.runner.groups.world)
    return bool(idle.item())


def list_requests(scheduler: SwitchingScheduler) -> tuple[list[Req], list[Req]]:
    """``(decoding, waiting)`` after :func:`drain`; a half-prefilled request counts as waiting."""
    chunked = [scheduler.chunked_req] if scheduler.chunked_req is not None else []
    waiting = chunked + scheduler.waiting_queue + scheduler.grammar_manager.grammar_queue
    return list(scheduler.running_batch.reqs), waiting


def split_by_kv(scheduler: SwitchingScheduler) -> tuple[list[Req], list[Req], list[np.ndarray]]:
    """``(live, waiting, rows)`` after :func:`drain`: requests that have KV, those that decode first; the others.

    ``rows``: KV slots of the tokens of each live one, int64 ``[tokens]``; the last token has none yet.  Of those that
    do not decode some may have fewer: only some pieces of a prompt are computed, or some KV was evicted.
    """
    decoding, waiting = list_requests(scheduler)
    parked = _list_parked(scheduler)
    there = {id(req) for req, _ in parked}
    rows = read_kv_rows(scheduler, decoding, [slots for _, slots in parked])
    return decoding + [req for req, _ in parked], [req for req in waiting if id(req) not in there], rows


def list_decoded_waiting(scheduler: SwitchingScheduler) -> list[Req]:
    """Those that decoded and wait now: parked by a switch, or retracted."""
    return [req for req in scheduler.waiting_queue if req.output_ids]


def can_keep_pieces(scheduler: SwitchingScheduler) -> bool:
    """Whether what is computed of a prompt goes over: KV moves, and there is a tree to wait in."""
    tree = scheduler.tree_cache
    return scheduler.adaptive.kv != "recompute" and not (tree.is_chunk_cache() or tree.disable)


def _list_parked(scheduler: SwitchingScheduler) -> list[tuple[Req, torch.Tensor]]:
    """Requests that wait and have KV, with its slots: those that decoded first, then prompts in pieces.

    An earlier switch has left it in the radix tree (``install.py``), where some may have been lost to others that
    decode; the prompt whose pieces are being computed holds its own.  Who has decoded has none in a pause by a client:
    one that has retracted all requests promises that no KV is in use, so that weights can be updated and the tree
    emptied.
    """
    tree = scheduler.tree_cache
    if tree.is_chunk_cache() or tree.disable:
        return []
    chunked = scheduler.chunked_req
    waiting = [] if scheduler._paused_by_client else list_decoded_waiting(scheduler)
    waiting += [req for req in scheduler.waiting_queue if req.extend_batch_idx and not req.output_ids]
    found: list[tuple[Req, torch.Tensor]] = []
    for req in waiting:
        if len(slots := find_kv_in_tree(scheduler, req)):
            found.append((req, slots))
    if chunked is not None:
        table = scheduler.req_to_token_pool.req_to_token
        found.append((chunked, table[chunked.req_pool_idx, : chunked.kv_committed_len]))
    return found


def find_kv_in_tree(scheduler: SwitchingScheduler, req: Req) -> torch.Tensor:
    """Slots of the first tokens of ``req`` that the radix tree has, of all but its last one, ``[tokens]``."""
    tree = scheduler.tree_cache
    if tree.is_chunk_cache() or tree.disable:
        return torch.empty(0, dtype=torch.int64)
    key = RadixKey((req.origin_input_ids + req.output_ids)[:-1], req.extra_key)
    return tree.match_prefix(MatchPrefixParams(key=key)).device_indices


def read_kv_rows(scheduler: SwitchingScheduler, decoding: list[Req], parked: list[torch.Tensor]) -> list[np.ndarray]:
    """KV slots of the tokens of each, int64 ``[tokens]``; one read of the device for each of the two."""
    rows: list[np.ndarray] = []
    if decoding:
        lengths = [req.kv_committed_len for req in decoding]
        places = upload([req.req_pool_idx for req in decoding], torch.int64, scheduler.device)
        table = download(scheduler.req_to_token_pool.req_to_token[places, : max(lengths)])
        rows += [row[:length].astype(np.int64) for row, length in zip(table, lengths, strict=True)]
    if parked:
        ends = np.cumsum([len(slots) for slots in parked])
        rows += np.split(download(torch.cat(parked)).astype(np.int64), ends[:-1])
    return rows


def recompute_all(scheduler: SwitchingScheduler) -> None:
    """Send every request back to the queue as tokens, and empty the pools: their KV may have been overwritten."""
    decoding, waiting = list_requests(scheduler)
    for req in decoding + ([scheduler.chunked_req] if scheduler.chunked_req is not None else []):
        req.req_pool_idx = None
        req.reset_for_retract()
        drop_piece_logprobs(req)
    grammar_queue = scheduler.grammar_manager.grammar_queue
    scheduler.clear_pools()
    scheduler.running_batch = ScheduleBatch(reqs=[], batch_is_full=False)
    scheduler.chunked_req, scheduler._chunked_req_scheduled_last_iter = None, False
    scheduler.waiting_queue = decoding + [req for req in waiting if req not in grammar_queue]


def check_sums(scheduler: SwitchingScheduler) -> None:
    """Raise ``RuntimeError`` naming all terms if KV slots or request slots do not add up."""
    reqs = scheduler.running_batch.reqs
    held = sum(req.kv_allocated_len - req.cache_protected_len for req in reqs)
    leak, message = scheduler._check_full_pool(scheduler.get_pool_stats(), uncached=held)
    if leak:
        raise RuntimeError(f"KV slots do not add up after the switch: {message}")
    free, used, size = scheduler.req_to_token_pool.available_size(), len(reqs), scheduler.req_to_token_pool.size
    if free + used != size:
        raise RuntimeError(f"request slots do not add up after the switch: {free=} + {used=} != {size=}")


# -- one request, as a capsule -------------------------------------------------------------------------

CARRIED = (
    "output_ids decoded_text surr_offset read_offset cur_decode_ids_len send_token_offset send_decode_id_offset "
    "send_output_token_logprobs_offset input_logprob_sent input_token_logprobs_val input_token_logprobs_idx "
    "input_top_logprobs_val input_top_logprobs_idx input_token_ids_logprobs_val input_token_ids_logprobs_idx "
    "output_token_logprobs_val output_token_logprobs_idx output_top_logprobs_val "
    "output_top_logprobs_idx output_token_ids_logprobs_val output_token_ids_logprobs_idx hidden_states customized_info "
    "cached_tokens cached_tokens_device cached_tokens_host cached_tokens_storage "
    "_cache_breakdown_computed retraction_count is_retracted retracted_stain to_finish finished_reason finished_len "
    "finished_output reasoning_tokens _is_reasoning_over return_logprob logprob_start_len origin_input_ids "
    "extend_batch_idx decode_batch_idx grammar_wait_ct temp_scaled_logprobs top_p_normalized_logprobs "
    "has_log_time_stats "
    # of the pieces of a prompt that have been computed
    "input_token_logprobs temp_input_top_logprobs_val temp_input_top_logprobs_idx "
    "temp_input_token_ids_logprobs_val temp_input_token_ids_logprobs_idx"
).split()
"""Attributes that go over as they are."""

LOGPROBS = tuple(name for name in CARRIED if re.fullmatch("(in|out)put_.*logprobs_(val|idx)", name))
"""Lists with an entry for each token where logprobs are asked for.  SGLang sends each entry to the client once, a
stretch of some tokens at a time, and does not look at it again: what was sent does not go over."""


@dataclass(frozen=True, slots=True)
class UnsentLogprobs:
    """One of :data:`LOGPROBS`: how many of its entries were sent, and the others."""

    sent: int
    entries: list[Any]


@dataclass
class Capsule:
    """One request on its way to new ranks.

    Attributes:
        sealed: the tokenized request as the TokenizerManager sent it, and its prompt (:func:`pickle_request`).
        output: token ids, unsigned 32 bit.  As an array: pickling a list takes a step for each token.
        state: values of :data:`CARRIED`, but ``output_ids``; those of :data:`LOGPROBS` that are not empty as
            :class:`UnsentLogprobs`.
        times: numeric fields of SGLang's time stats (seconds of this machine's clock).
        compiling: it waits for its grammar; ``constrained``: it has one, which may be to come.
        degrees: which TP degree generated which of its tokens.
    """

    sealed: bytes
    output: array
    state: dict[str, Any]
    times: dict[str, float]
    compiling: bool
    constrained: bool
    degrees: Degrees


def pickle_request(req: Req) -> bytes:
    """What of ``req`` never changes, pickled on first use: before the pause, in PREPARE.

    ``req.pat_request`` and ``req.pat_prompt`` were attached by the adaptive scheduler when the request came in.
    """
    if req.pat_sealed is None:
        request = copy.copy(req.pat_request)
        request.input_ids = None  # the prompt has them
        req.pat_sealed = pickle.dumps((request, req.pat_prompt), pickle.HIGHEST_PROTOCOL)
    return req.pat_sealed


def unpickle_request(sealed: bytes) -> tuple[TokenizedGenerateReqInput, array]:
    """The request as it came in, and its prompt's token ids (unsigned 32 bit)."""
    request, prompt = pickle.loads(sealed)
    request.input_ids = prompt.tolist()
    return request, prompt


def serialize_request(req: Req) -> Capsule:
    """The capsule of ``req``, which is not touched but for its seal."""
    # SGLang sets some attributes on first use only.
    state = {name: getattr(req, name) for name in CARRIED if hasattr(req, name)}
    output = array("I", state.pop("output_ids"))
    for name in LOGPROBS:
        if entries := state.get(name):
            state[name] = _take_unsent(req, name, entries)
    if req.origin_input_ids is req.pat_request.input_ids:
        del state["origin_input_ids"]
    times = {
        field.name: value
        for field in fields(req.time_stats)
        if isinstance(value := getattr(req.time_stats, field.name), (int, float))
    }
    compiling, constrained = grammars.is_compiling(req), req.grammar is not None
    return Capsule(pickle_request(req), output, state, times, compiling, constrained, req.pat_degrees)


def _take_unsent(req: Req, name: str, entries: list[Any]) -> UnsentLogprobs:
    if name.startswith("input_"):
        sent = len(entries) if req.input_logprob_sent else 0
    else:
        # SGLang's count is at least one, also after an output without tokens.
        sent = min(req.send_output_token_logprobs_offset, len(entries))
    return UnsentLogprobs(sent, entries[sent:])


def restore_state(req: Req, capsule: Capsule) -> None:
    """Give a fresh ``Req`` (made from what ``capsule`` seals) the state it had before the switch."""
    req.output_ids = capsule.output.tolist()
    for name, value in capsule.state.items():
        # The others keep their places, by which SGLang finds them.
        setattr(req, name, [None] * value.sent + value.entries if isinstance(value, UnsentLogprobs) else value)
    for name, value in capsule.times.items():
        setattr(req.time_stats, name, value)
    req.pat_degrees = capsule.degrees
    if req.surr_offset is not None:
        # SGLang keeps this list beside its parts; rebuilt instead of sent twice.
        req.surr_and_decode_ids = (
            list(req.origin_input_ids_unpadded[req.surr_offset :]) + req.output_ids[: req.cur_decode_ids_len]
        )


def rebuild_request(scheduler: SwitchingScheduler, capsule: Capsule, held_grammar: Any | None = None) -> Req:
    """A ``Req`` of this scheduler, in the state in which ``capsule`` found it.

    ``held_grammar``: its grammar as it stands, or the future one, if it was here before.
    """
    given, prompt = unpickle_request(capsule.sealed)
    # In the queue an abort takes the grammar away; one that runs keeps it, on all ranks of its group or on none.
    given_up = capsule.state.get("to_finish") is not None and not capsule.constrained
    with scheduler.grammars.use_for_rebuild(held_grammar, capsule.compiling, given_up):
        req = scheduler.construct(given, prompt, capsule.sealed)
    if held_grammar is not None:
        req.grammar = held_grammar  # also one that no text asks for (strict thinking)
    refused = req.to_finish
    restore_state(req, capsule)
    if refused is not None and req.to_finish is None:
        # Its grammar turned out not to compile.
        req.set_finish_with_abort(refused.message)
    return req


def drop_piece_logprobs(req: Req) -> None:
    """Of a prompt whose pieces are computed again: SGLang (0.5.12) forgets some of their logprobs and keeps others."""
    req.temp_input_top_logprobs_val = req.temp_input_top_logprobs_idx = None
    req.temp_input_token_ids_logprobs_val = req.temp_input_token_ids_logprobs_idx = None


@contextmanager
def keep_piece_logprobs(waiting: list[Req]) -> Iterator[None]:
    """Inside, SGLang makes a batch of some of ``waiting``.

    It takes no KV from the tree of tokens whose logprobs are asked for, and computes both.  Of a prompt in pieces that
    a switch has brought the logprobs are there.
    """
    begun = [(req, req.logprob_start_len) for req in waiting if req.input_token_logprobs]
    for req, start in begun:
        req.logprob_start_len = start + len(req.input_token_logprobs)
    try:
        yield
    finally:
        for req, start in begun:
            req.logprob_start_len = start


# -- from the old groups to the new ones ----------------------------------------------------------------


@dataclass
class GroupOffer:
    """What one old group puts on the table, from its leader.

    Attributes:
        live: the plan's view of the requests that have KV: those that decode in batch order, then those that wait for a
            decode slot or for the rest of a prefill.
        waiting: destination group of each request that waits for a prefill.
        capsules: destination group -> bytes of its requests' capsules, pickled together, live ones first; only of
            groups with ranks that do not hold these requests already, which get them from this leader.
        sent: outputs this leader has sent so far (``sglang_pat.switch.order``).
        fence: what its next output would have carried as a fence.
        weight_version: number of weight updates this rank has applied.
        entered: when each request came into the queue, by the leader's clock; live ones first.
        taken: what ranks of a new group take over from their leader (``install.COUNTERS``).
    """

    live: list[plan.LiveRequest] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    capsules: dict[int, int] = field(default_factory=dict)
    sent: int = 0
    fence: dict[int, int] | None = None
    weight_version: int = 0
    entered: list[float] = field(default_factory=list)
    taken: dict[str, Any] = field(default_factory=dict)


@dataclass
class IncomingRequests:
    """Requests of this rank's new group, rebuilt.

    Attributes:
        decoding: request, its slots in the plan (int64 ``[tokens]``), and how many of them it shares with an earlier
            one.
        waiting: requests that start with a prefill.
        parked: those of them whose KV came along, as in ``decoding``.
        place: slot of the new pool view for each slot of the plan, int64 ``[num_slots + 1]``.
        entered: rid -> when it came into the queue, of those that this rank held: their leader's clock counts, since
            priority scheduling sorts by it.
    """

    decoding: list[tuple[Req, np.ndarray, int]] = field(default_factory=list)
    waiting: list[Req] = field(default_factory=list)
    parked: list[tuple[Req, np.ndarray, int]] = field(default_factory=list)
    place: np.ndarray = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    entered: dict[str, float] = field(default_factory=dict)

    @property
    def num_slots(self) -> int:
        """KV slots in use."""
        return len(self.place) - 1

    @property
    def recomputed(self) -> list[Req]:
        """Requests that decoded and lost their KV."""
        parked = {req.rid for req, _, _ in self.parked}
        return [req for req in self.waiting if req.output_ids and req.rid not in parked]


def compute_least_moved(scheduler: SwitchingScheduler, recompute_below: int) -> int:
    """KV tokens that a request must have to be moved with them, by ``--pat-kv`` and by a command's
    ``recompute_below``."""
    return (
        NO_KV if recompute_below == NO_KV else {"migrate": 0, "auto": recompute_below}.get(scheduler.adaptive.kv, NO_KV)
    )


GROWTH = 16
"""Tokens that a request may still get between PREPARE and the pause: memory for them costs less than taking it then."""


def count_tokens_to_move(scheduler: SwitchingScheduler, recompute_below: int = 0) -> int:
    """KV tokens, about, that a switch would move if it came now; ``recompute_below``: of the command."""
    lengths = [req.kv_committed_len + GROWTH for req in scheduler.running_batch.reqs]
    lengths += [req.seqlen for req in list_decoded_waiting(scheduler)]
    least = compute_least_moved(scheduler, recompute_below)
    tokens = sum(length for length in lengths if length >= least)
    if (prompt := scheduler.chunked_req) is not None and least != NO_KV and can_keep_pieces(scheduler):
        tokens += min(prompt.kv_committed_len + (scheduler.chunked_prefill_size or 0), prompt.seqlen)
    return tokens


def seal_requests(scheduler: SwitchingScheduler, new: ParallelLayout) -> list[Grammar]:
    """Before the pause: pickle what of this group's requests never changes, if it is going to travel.

    Returns:
        Grammars that the ranks of other groups will need.
    """
    if not scheduler.is_leader or not needs_capsules(scheduler.layouts.layout, new):
        return []
    reqs = scheduler.running_batch.reqs + scheduler.waiting_queue
    for req in reqs:
        pickle_request(req)
    return grammars.list_needed_grammars(reqs)


def make_offer(
    scheduler: SwitchingScheduler,
    new: ParallelLayout,
    live: list[Req],
    waiting: list[Req],
    rows: list[np.ndarray],
    recompute_below: int,
) -> tuple[GroupOffer, dict[int, bytes]]:
    """This group's offer, and the leader's capsules; else every rank of a group computes the same.

    Args:
        rows: KV slots of the live requests, int64 ``[tokens]`` each.
        recompute_below: of the command; but of requests in the middle of a prefill: where switches come often, each
            piece would be lost before the next one.
    """
    layouts = scheduler.layouts
    old = layouts.layout
    own = old.group_of(scheduler.rank)
    complete = [bool(req.output_ids) and len(row) == req.seqlen - 1 for req, row in zip(live, rows, strict=True)]
    lengths = [len(row) if done else req.seqlen for req, row, done in zip(live, rows, complete, strict=True)]
    lengths += [req.seqlen for req in waiting]
    least = compute_least_moved(scheduler, recompute_below)
    of_pieces = least if least == NO_KV else 0
    rows = [
        row if len(row) >= (least if done else of_pieces) else row[:0] for row, done in zip(rows, complete, strict=True)
    ]
    dests = plan.choose_destinations(old, new, own, lengths)
    live_dest = dests[: len(live)]
    shared = plan.find_shared_prefixes(rows, live_dest, layouts.current.kv_pool.size + 1)
    planned = [
        plan.LiveRequest(len(row), *pair, dest, done)
        for row, pair, dest, done in zip(rows, shared, live_dest, complete, strict=True)
    ]
    capsules: dict[int, bytes] = {}
    if scheduler.is_leader and needs_capsules(old, new):
        bound: dict[int, list[Capsule]] = {}
        for req, dest in zip(live + waiting, dests, strict=True):
            if new.tp > old.tp or dest != own:  # else nobody lacks it
                bound.setdefault(dest, []).append(serialize_request(req))
        capsules = {dest: pickle.dumps(found, pickle.HIGHEST_PROTOCOL) for dest, found in bound.items()}
    output = scheduler.output
    offer = GroupOffer(
        planned,
        dests[len(live) :],
        {dest: len(data) for dest, data in capsules.items()},
        output.sent,
        output.fence,
        layouts.weight_version,
        [req.time_stats.wait_queue_entry_time for req in live + waiting],
    )
    return offer, capsules


def send_capsules(
    scheduler: SwitchingScheduler, new: ParallelLayout, offers: dict[int, GroupOffer], mine: dict[int, bytes]
) -> dict[int, bytes]:
    """Capsules from the leaders to the ranks that need them, and to no other; all ranks take part.

    Args:
        mine: what this rank sends, by destination group; empty unless it leads.

    Returns:
        What comes to this rank, by source group.
    """
    old, rank = scheduler.layouts.layout, scheduler.rank
    sends = plan.list_capsules_to_send(old, new, rank, mine)
    comes = plan.list_capsule_sizes(old, new, rank, {source: offer.capsules for source, offer in offers.items()})
    outgoing = torch.from_numpy(np.frombuffer(bytearray().join(sends), dtype=np.uint8))
    received = torch.empty(sum(comes), dtype=torch.uint8)
    world = scheduler.layouts.runner.groups.world
    dist.all_to_all_single(received, outgoing, comes, [len(data) for data in sends], group=world)
    parts = torch.split(received, comes)
    return {source: parts[old.leaders[source]].numpy().tobytes() for source in offers if comes[old.leaders[source]]}


def plan_groups(
    scheduler: SwitchingScheduler, new: ParallelLayout, offers: dict[int, GroupOffer]
) -> dict[int, plan.GroupPlan]:
    """The plan of every new group that a member of this rank's exchange group will belong to."""
    layouts = scheduler.layouts
    _, members = layouts.runner.groups.exchange_group(layouts.layout, new)
    max_requests = min(scheduler.req_to_token_pool.size, scheduler.max_running_requests)
    sources = {group: offer.live for group, offer in offers.items()}
    tree, capacity = scheduler.tree_cache, layouts[new].allocator.size
    keep = not (tree.is_chunk_cache() or tree.disable)
    return {g: plan.plan_group(g, sources, max_requests, capacity, keep) for g in {new.group_of(m) for m in members}}


def rebuild_requests(
    scheduler: SwitchingScheduler,
    new: ParallelLayout,
    group_plan: plan.GroupPlan,
    offers: dict[int, GroupOffer],
    capsules: dict[int, bytes],
    held: list[Req],
    place: np.ndarray,
) -> IncomingRequests:
    """The requests that come to this rank's new group, decoding ones in plan order.

    Those that decode before and after, and that this rank ``held`` (live ones first, as in its own group's offer), go
    on as they are: all ranks of a group keep the same account of a request.  The others are rebuilt.  Nothing of what
    is held is changed here, so that an aborted switch goes on with it.
    """
    mine = new.group_of(scheduler.rank)
    own = scheduler.layouts.layout.group_of(scheduler.rank)
    incoming = IncomingRequests(place=place)
    recompute: list[Req] = []
    queued: list[Req] = []
    for group, offer in offers.items():
        if group == own:
            dests = [live.dest for live in offer.live] + offer.waiting
            coming = iter([req for req, dest in zip(held, dests, strict=True) if dest == mine])
            incoming.entered = {req.rid: at for req, at in zip(held, offer.entered, strict=True)}
        else:
            coming = iter(pickle.loads(capsules[group]) if group in capsules else ())
        planned = zip(offer.live, group_plan.rows[group], group_plan.decodes[group], strict=True)
        for live, row, decodes in planned:
            if live.dest != mine:
                continue
            req = next(coming)
            goes_on = decodes and isinstance(req, Req) and req.req_pool_idx is not None
            if not goes_on:
                req = _rebuild_one(scheduler, req)
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
        if req.grammar is not None and not one.compiling:
            grammars.replay(req.grammar, req.output_ids)
        return req
    return rebuild_request(scheduler, serialize_request(one), held_grammar=one.grammar)
