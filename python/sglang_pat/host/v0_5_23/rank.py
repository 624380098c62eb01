"""What a rank's objects look like: groups, layers, batches, the loop, requests, their KV, and the radix tree.

A function without a docstring is the operation of ``host/`` of the same name.
"""

from __future__ import annotations

import copy
from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import bootstrap, parallel_state
from sglang.srt.distributed.parallel_state import GroupCoordinator
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.managers import schedule_batch
from sglang.srt.managers.overlap_utils import resolve_forward_inputs
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.scheduler import configure_scheduler_process
from sglang.srt.mem_cache import registry
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.runtime_context import SpawnRanks, create_context, get_parallel, publish, use_context
from sglang.srt.server_args import ServerArgs
from sglang.srt.state_capturer import base
from sglang.srt.state_capturer.routed_experts import RoutedExpertsCapturer

from sglang_pat.host.assign import assign, assigned

GRAPHS = "decode_cuda_graph_runner"
"""Attribute of the model runner with the decode graphs."""

# -- the process, which publishes its configuration before it builds anything ------------------------------------------


def configure(args: Any, rank: int, gpu_id: int, tp_rank: int) -> dict[str, Any]:
    """Prepare this process to be a rank of ``args``, those of one replica of the base layout.

    Returns:
        What a scheduler is told of its place, beside the arguments: nothing, it is published.
    """
    register_tree()
    context = publish(args, role="scheduler", ranks=SpawnRanks(world_rank=tp_rank, gpu_id=gpu_id))
    context.override("sglang_pat", radix_cache_backend=TREE_BACKEND)
    configure_scheduler_process(args, gpu_id)
    return {}


def publish_arguments(args: ServerArgs) -> None:
    """Make ``args`` those of this process, one rank without its peers (``testing/lone.py``)."""
    args.resolve_once()
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0))


def use_arguments(args: ServerArgs) -> AbstractContextManager[Any]:
    """Have ``args`` be those of this process inside the block."""
    args.resolve_once()
    return use_context(create_context(args, role="scheduler", ranks=SpawnRanks(world_rank=0)))


def init_layers(args: ServerArgs, config: ModelConfig) -> None:
    """Set up what layers look at, once the groups are there."""
    initialize_dp_attention(server_args=args)
    bootstrap.init_layer_runtime(model_config=config)


# -- groups, ranks and sizes: in SGLang's ``ParallelContext``, which layers and schedulers read on each call -----------


def set_global_groups(tp: GroupCoordinator, single: GroupCoordinator) -> None:
    """Have SGLang's layers reduce in ``tp``; they look it up when they are called.

    The degrees that are refused at start always have the group ``single`` of one rank.
    """
    # SGLang checks that groups, ranks and sizes agree, so all are set at once.  CUDA graphs are captured in the groups
    # that ``parallel_state`` has beside the context.
    groups = dict.fromkeys(("tp", "attn_tp", "moe_tp", "shared_experts_tp"), tp)
    groups |= dict.fromkeys(("pp", "attn_cp", "moe_dp", "moe_ep"), single)
    values: dict[str, Any] = {f"{name}_group": group for name, group in groups.items()}
    for name in ("tp", "attn_tp", "moe_tp"):
        values |= {f"{name}_rank": tp.rank_in_group, f"{name}_size": tp.world_size}
    get_parallel().override_permanently(**values)
    assign(parallel_state, **{f"_{name.upper()}": group for name, group in groups.items()})


def set_scheduler_group(scheduler: Any, group: GroupCoordinator, tp_rank: int, tp: int) -> None:
    """Make ``scheduler`` a rank of this group, where only this version keeps it."""
    assign(scheduler.weight_updater, tp_cpu_group=group.cpu_group)


def set_runner_group(worker: Any, runner: Any, group: GroupCoordinator, tp_rank: int, tp: int) -> None:
    """Make a worker and its model runner rank ``tp_rank`` of this group of ``tp`` ranks."""
    assign(runner.load_config, tp_rank=tp_rank)  # all else they ask the context


def get_place(scheduler: Any) -> tuple[int, int]:
    parallel = get_parallel()
    return parallel.tp_rank, parallel.tp_size


# -- layers ------------------------------------------------------------------------------------------------------------


class StockExpertsTable(RoutedExpertsCapturer):
    """The class that our table of routed experts is made of."""

    def destroy(self) -> None:
        """Do nothing where SGLang lets go of its own table, which is pinned."""


def skip_experts_table() -> AbstractContextManager[None]:
    """Have SGLang make a table without rows inside the block: it would map no bytes, and pin them."""
    return assigned(base, ALLOC_MEMORY_FUNCS=defaultdict(lambda: _make_plain))


def _make_plain(dims: tuple[int, ...], *, dtype: torch.dtype, **_: Any) -> torch.Tensor:
    return torch.empty(dims, dtype=dtype)


# -- batches: the tokens to decode after are in the scheduler's ``FutureMap``, by line ---------------------------------


def set_places(batch: ScheduleBatch, places: torch.Tensor, numbers: list[int]) -> None:
    """Set the line that each request has in the table of running requests, ``[requests]``, on the device and here."""
    assign(batch, req_pool_indices=places, req_pool_indices_cpu=torch.tensor(numbers, dtype=torch.int64))


def set_last_tokens(scheduler: Any, batch: ScheduleBatch, tokens: torch.Tensor) -> None:
    """Set the token that each request decodes after, int64 ``[requests]``."""
    assign(batch, input_ids=None)
    scheduler.future_map.output_tokens_buf[batch.req_pool_indices] = tokens


def compute_whole(req: Req) -> None:
    """Have the whole prompt of ``req`` computed, in one piece."""
    req.refresh_fill_ids()
    assign(req, prefix_len=0, extend_end=len(req.origin_input_ids))


def compute_logits(scheduler: Any, batch: ScheduleBatch) -> torch.Tensor:
    runner = scheduler.tp_worker.model_runner
    resolve_forward_inputs(batch, scheduler.future_map)
    output = runner.forward(ForwardBatch.init_new(batch, runner, return_hidden_states_before_norm=False))
    assign(batch, input_ids=None)
    return output.logits_output.next_token_logits


# -- the event loop, which passes batches on, and counts prefilled tokens for one of its policies ----------------------

CURRENT_BATCH = "cur_batch_for_debug"
"""Attribute of the scheduler with the batch that runs."""

COUNTERS = (
    "forward_ct", "recv_skipper._counter", "processed_tokens_counter", "_prefill_decode_interval_remaining",
    "policy._waiting_prefix_refresh_calls",
)  # fmt: skip
"""Attributes of the scheduler, dotted, that count steps and that a rank takes over from its new leader."""

STEP_MARKS = ("profiler_manager.profiler_start_forward_ct", "profiler_manager.profiler_target_forward_ct")
"""Attributes counted in steps of this rank, dotted, which move along when ``forward_ct`` does."""


def settle(scheduler: Any) -> None:
    """End the prompt in pieces whose abort SGLang has put off to the next step, which other ranks may not take."""
    scheduler.process_pending_chunked_abort()


def forget_chunk(scheduler: Any) -> None:
    """Do nothing: SGLang asks the request what the last step did."""


# -- requests: logprobs are in ``Req.logprob``, token ids in ``array("q")`` --------------------------------------------

CARRIED = (
    "_think_end_match_len", "_think_start_match_len", "weight_version_events", "sampling_mask_rows",
    "arrival_processed_tokens", "already_computed",
)  # fmt: skip
"""Attributes that go over as they are, beside those of ``host/requests.py``."""

FLAT_LOGPROBS = ("input_top_logprobs_val_flat", "input_top_logprobs_idx_flat", "input_top_logprobs_flat_null_prefix")
"""Other attributes with logprobs, which go over as they are."""

LATE = frozenset({"cur_decode_ids_len"})
"""Attributes that SGLang makes on first use: a fresh request does not have them."""


def get_logprobs(req: Req) -> Any:
    """The object that has the lists of logprobs, and the number and ids of what is asked for."""
    return req.logprob


def make_tokens(ids: Iterable[int]) -> array:
    """Token ids as ``Req`` keeps them."""
    return array("q", ids)


RELEASER = schedule_batch
"""Owner of ``release_req``, which takes a request's KV away."""


def find_released(*, req: Req, req_to_token_pool: ReqToTokenPool, **_: Any) -> tuple[Req, ReqToTokenPool]:
    """The request that a call of ``release_req`` is about, and the table that it has a line in."""
    return req, req_to_token_pool


# -- KV: a request's own is in ``Req.kv``; the components of the scheduler hold one allocator for good -----------------


def get_kv_record(req: Req) -> Any:
    """The object that says which line, how many slots, and how many of the tree's, ``req`` has."""
    return req.kv


def write_extent(req: Req, tokens: Any, slots: torch.Tensor) -> None:
    """Write which ``tokens`` of ``req``, which is about to decode, have KV; in which ``slots`` its line says."""
    req.refresh_fill_ids()
    assign(req, extend_end=len(tokens), prefix_len=len(tokens))


def forget_slots(req: Req) -> None:
    """Forget how many slots ``req``, which has no line any more, had."""
    req.kv.mark_kv_released()


def fill_view(view: MHATokenToKVPool, heads: int) -> None:
    """Compute what a view of a pool with ``heads`` heads has beside its buffers."""
    assign(view, row_dim=heads * view.head_dim, v_row_dim=heads * view.v_head_dim)
    if getattr(view, "data_strides", None) is not None:  # SGLang makes these where it moves slots
        view._init_data_ptrs_and_strides()


def copy_allocator(allocator: TokenToKVPoolAllocator) -> TokenToKVPoolAllocator:
    """The allocator that a layout keeps for its own: the scheduler's becomes another's in a switch."""
    return copy.copy(allocator)


def set_allocator(scheduler: Any, allocator: TokenToKVPoolAllocator) -> None:
    """Have the scheduler and its tree take slots from ``allocator``."""
    # A dozen components hold the scheduler's own allocator, some of them frozen: it stays, and becomes this one, once
    # its slots are freed (``clear_pools``).
    live, size = scheduler.token_to_kv_pool_allocator, allocator.size
    assign(live, size=size, _kvcache=allocator.get_kvcache())
    assign(scheduler, max_total_num_tokens=size)
    for part in (scheduler.pool_stats_observer, scheduler.invariant_checker, scheduler.load_inquirer):
        object.__setattr__(part, "max_total_num_tokens", size * scheduler.kv_shard_widening)
    assign(scheduler.kv_events_publisher, max_total_num_tokens=size)


def find_leak(scheduler: Any, held: int) -> str | None:
    """A line with all terms if KV slots do not add up, of which requests hold ``held``; None if they do."""
    stats = scheduler.pool_stats_observer.get_pool_stats()
    leak, message = scheduler.invariant_checker._check_full_pool(stats, uncached=held)
    return message if leak else None


# -- the radix tree: slots are read off the path to a node, and a request holds a ``TreeLock`` -------------------------

TREE_BACKEND = "sglang_pat"
"""Value of ``--radix-cache-backend`` for the plain ``RadixCache``, which a switch fills.

SGLang's own choice is ``UnifiedRadixCache``, for models with several kinds of state.
"""


def register_tree() -> None:
    """Make :data:`TREE_BACKEND` known to SGLang, in every process that reads its arguments."""
    if registry.get_radix_cache_factory(TREE_BACKEND) is None:
        registry.register_radix_cache_backend(TREE_BACKEND, lambda context: RadixCache(context.params))


def make_key(req: Req | None, tokens: Sequence[int]) -> RadixKey:
    """The key of ``tokens`` of ``req``, or of nobody's."""
    ids = tokens if isinstance(tokens, array) else array("q", tokens)
    return RadixKey(ids) if req is None else RadixKey(ids, req.extra_key, cache_salt=req.cache_salt)


def read_slots(tree: Any, match: Any) -> torch.Tensor:
    """Slots of what was found, int64 ``[tokens]``."""
    return tree.path_device_indices(match.last_device_node)


def hold(tree: Any, req: Req, node: Any, protected: int) -> None:
    """Keep what is in the tree up to ``node`` for ``req``, of whose tokens the tree has the first ``protected``."""
    assign(req.kv, cache_protected_len=protected, cache_inserted_len=protected)
    assign(req, lock=tree.lock(node))
