"""What a rank's objects look like: groups, layers, batches, the loop, requests, their KV, and the radix tree.

A function without a docstring is the operation of ``host/`` of the same name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from sglang.srt import server_args
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.parallel_state import GroupCoordinator
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.scheduler import configure_scheduler_process
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.srt.state_capturer.routed_experts import RoutedExpertsCapturer

from sglang_pat.host.assign import assign, assigned

GRAPHS = "graph_runner"
"""Attribute of the model runner with the decode graphs."""

# -- the process -------------------------------------------------------------------------------------------------------


def configure(args: Any, rank: int, gpu_id: int, tp_rank: int) -> dict[str, Any]:
    """Prepare this process to be a rank of ``args``, those of one replica of the base layout.

    Returns:
        What a scheduler is told of its place, beside the arguments.
    """
    # With all ranks as one group: the cores of a machine are shared out over them.
    configure_scheduler_process(args, gpu_id, rank, 0, 0, 0, 0, None)
    return dict(gpu_id=gpu_id, tp_rank=tp_rank, moe_ep_rank=0, pp_rank=0, attn_cp_rank=0, moe_dp_rank=0, dp_rank=None)


def publish_arguments(args: ServerArgs) -> None:
    """Make ``args`` those of this process, one rank without its peers (``testing/lone.py``)."""
    set_global_server_args_for_scheduler(args)


def use_arguments(args: ServerArgs) -> AbstractContextManager[Any]:
    """Have ``args`` be those of this process inside the block."""
    return assigned(server_args, _global_server_args=args)


def init_layers(args: ServerArgs, config: ModelConfig) -> None:
    """Set up what layers look at, once the groups are there."""
    initialize_dp_attention(server_args=args, model_config=config)


# -- groups, ranks and sizes: in globals, and copied into scheduler, worker and runner ---------------------------------


def set_global_groups(tp: GroupCoordinator, single: GroupCoordinator) -> None:
    """Have SGLang's layers reduce in ``tp``; they look it up when they are called.

    The degrees that are refused at start always have the group ``single`` of one rank.
    """
    assign(parallel_state, _TP=tp, _ATTN_TP=tp, _MOE_TP=tp, _PP=single, _ATTN_CP=single, _MOE_DP=single, _MOE_EP=single)


def set_scheduler_group(scheduler: Any, group: GroupCoordinator, tp_rank: int, tp: int) -> None:
    """Make ``scheduler`` rank ``tp_rank`` of ``tp``, where only this version keeps it."""
    assign(scheduler, tp_rank=tp_rank, attn_tp_rank=tp_rank, attn_tp_size=tp)


def set_runner_group(worker: Any, runner: Any, group: GroupCoordinator, tp_rank: int, tp: int) -> None:
    """Make a worker and its model runner rank ``tp_rank`` of this group of ``tp`` ranks."""
    assign(runner, tp_group=group, attention_tp_group=group)
    for owner in (worker, runner):
        assign(owner, tp_rank=tp_rank, tp_size=tp)
    assign(runner.load_config, tp_rank=tp_rank)
    assign(runner.server_args, tp_size=tp)


def get_place(scheduler: Any) -> tuple[int, int]:
    return scheduler.tp_rank, scheduler.tp_size


# -- layers ------------------------------------------------------------------------------------------------------------

StockExpertsTable = RoutedExpertsCapturer
"""The class that our table of routed experts is made of."""


def skip_experts_table() -> AbstractContextManager[None]:
    """Have SGLang make a table without rows inside the block: one that is empty is not pinned."""
    return nullcontext()


# -- batches: the tokens to decode after are in ``output_ids`` ---------------------------------------------------------


def set_places(batch: ScheduleBatch, places: torch.Tensor, numbers: list[int]) -> None:
    """Set the line that each request has in the table of running requests, ``[requests]``, on the device and here."""
    assign(batch, req_pool_indices=places)


def set_last_tokens(scheduler: Any, batch: ScheduleBatch, tokens: torch.Tensor) -> None:
    """Set the token that each request decodes after, int64 ``[requests]``."""
    assign(batch, output_ids=tokens)


def compute_whole(req: Req) -> None:
    """Have the whole prompt of ``req`` computed, in one piece."""
    assign(req, fill_ids=req.origin_input_ids)
    req.set_extend_input_len(len(req.fill_ids))


def compute_logits(scheduler: Any, batch: ScheduleBatch) -> torch.Tensor:
    runner = scheduler.tp_worker.model_runner
    output = runner.forward(ForwardBatch.init_new(batch.get_model_worker_batch(), runner))
    return output.logits_output.next_token_logits


# -- the event loop ----------------------------------------------------------------------------------------------------

CURRENT_BATCH = "cur_batch"
"""Attribute of the scheduler with the batch that runs."""

COUNTERS = ("forward_ct", "recv_skipper._counter")
"""Attributes of the scheduler, dotted, that count steps and that a rank takes over from its new leader."""

STEP_MARKS = ("profiler_start_forward_ct", "profiler_target_forward_ct")
"""Attributes counted in steps of this rank, dotted, which move along when ``forward_ct`` does."""


def settle(scheduler: Any) -> None:
    """Do nothing: nothing is put off to the next step."""


def forget_chunk(scheduler: Any) -> None:
    """Forget what the last step did with a prompt in pieces, of which there is none now."""
    assign(scheduler, _chunked_req_scheduled_last_iter=False)


# -- requests: all of their state is in attributes of ``Req`` ----------------------------------------------------------

CARRIED = ()
"""Attributes that go over as they are, beside those of ``host/requests.py``."""

FLAT_LOGPROBS = ()
"""Other attributes with logprobs, which go over as they are."""

LATE = frozenset({"cur_decode_ids_len", "input_top_logprobs_val"})
"""Attributes that SGLang makes on first use: a fresh request does not have them."""


def get_logprobs(req: Req) -> Any:
    """The object that has the lists of logprobs, and the number and ids of what is asked for."""
    return req


def make_tokens(ids: Iterable[int]) -> list[int]:
    """Token ids as ``Req`` keeps them."""
    return list(ids)


RELEASER = ScheduleBatch
"""Owner of ``release_req``, which takes a request's KV away."""


def find_released(batch: ScheduleBatch, idx: int, *_: Any, **__: Any) -> tuple[Req, ReqToTokenPool]:
    """The request that a call of ``release_req`` is about, and the table that it has a line in."""
    return batch.reqs[idx], batch.req_to_token_pool


# -- KV ----------------------------------------------------------------------------------------------------------------


def get_kv_record(req: Req) -> Any:
    """The object that says which line, how many slots, and how many of the tree's, ``req`` has."""
    return req


def write_extent(req: Req, tokens: list[int], slots: torch.Tensor) -> None:
    """Write which ``tokens`` of ``req``, which is about to decode, have KV, and in which ``slots``."""
    assign(req, fill_ids=tokens, prefix_indices=slots)


def forget_slots(req: Req) -> None:
    """Forget how many slots ``req``, which has no line any more, had."""


def fill_view(view: MHATokenToKVPool, heads: int) -> None:
    """Compute what a view of a pool with ``heads`` heads has beside its buffers."""
    strides = [x.stride(0) * x.dtype.itemsize for x in [*view.k_buffer, *view.v_buffer]]
    assign(view, data_strides=torch.tensor(strides, device=view.device), row_dim=heads * view.head_dim)


def copy_allocator(allocator: TokenToKVPoolAllocator) -> TokenToKVPoolAllocator:
    """The allocator that a layout keeps for its own: the scheduler is given another one in a switch."""
    return allocator


def set_allocator(scheduler: Any, allocator: TokenToKVPoolAllocator) -> None:
    """Have the scheduler and its tree take slots from ``allocator``."""
    assign(scheduler, token_to_kv_pool_allocator=allocator, max_total_num_tokens=allocator.size)
    assign(scheduler.tree_cache, token_to_kv_pool_allocator=allocator)


def find_leak(scheduler: Any, held: int) -> str | None:
    """A line with all terms if KV slots do not add up, of which requests hold ``held``; None if they do."""
    leak, message = scheduler._check_full_pool(scheduler.get_pool_stats(), uncached=held)
    return message if leak else None


# -- the radix tree: it hands out slots, and a request holds the last node itself --------------------------------------


def make_key(req: Req | None, tokens: Sequence[int]) -> RadixKey:
    """The key of ``tokens`` of ``req``, or of nobody's."""
    return RadixKey(tokens, None if req is None else req.extra_key)


def read_slots(tree: Any, match: Any) -> torch.Tensor:
    """Slots of what was found, int64 ``[tokens]``."""
    return match.device_indices


def hold(tree: Any, req: Req, node: Any, protected: int) -> None:
    """Keep what is in the tree up to ``node`` for ``req``, of whose tokens the tree has the first ``protected``."""
    assign(req, cache_protected_len=protected)
    tree.inc_lock_ref(node)
