"""Routing replay (R3): which experts each token was routed to, kept across switches.

SGLang keeps a row for each KV slot, and reads a request's rows by its slots when it ends.  In a switch tokens get other
slots, and requests another leader, which is who answers.  So the new leader copies the rows of all tokens that bring
their KV, out of the old leaders' tables into its own.

A rank has two tables, which all ranks see: one is in use, and the next switch fills the other.  So nobody writes what
is read in a switch, nothing has to be packed or sent, and a switch that is aborted has changed nothing.  And it need
not be done in the pause: a thread copies while the next steps are made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from sglang_pat.cpu.windows import Windows
from sglang_pat.host import adapter
from sglang_pat.host.assign import assign
from sglang_pat.rank.routed_rows import Table
from sglang_pat.switch.plan import GroupPlan, LiveRequest, list_slots_once, match_slots

if TYPE_CHECKING:
    from sglang.srt.state_capturer.routed_experts import RoutedExpertsCapturer as StockTable
else:
    StockTable = adapter.rank.StockExpertsTable


class RoutedExperts(StockTable):
    """SGLang's ``RoutedExpertsCapturer`` with tables that go through switches, of small integers.

    Tables take a quarter of the memory, or half.

    Life cycle of a switch: every old leader calls :meth:`publish`; after that, in any order, every new leader
    :meth:`plan_copy`; and when all are through, every rank :meth:`turn`.  Rows come after that; the next
    :meth:`publish` waits until they are there.

    Args:
        slots: KV slots of the layout that has most of them; ``step``: most tokens of a step.
        group: the group of all ranks, on one machine.

    Raises:
        OSError: a rank cannot see another's memory, or there is not enough of it.
    """

    def __init__(self, model_config: Any, *, slots: int, step: int, device: str, group: dist.ProcessGroup) -> None:
        # Of SGLang's own table nothing: it would be pinned, for one layout, and of int32.
        with adapter.rank.skip_experts_table():
            super().__init__(model_config, 0, step, num_fused_shared_experts=0, device=device)
        self._dtype = torch.uint8 if model_config.hf_text_config.num_experts <= 256 else torch.int16
        self._shape = slots, self.num_layers, self.topk_size
        self._places = -(-int(np.prod(self._shape)) * self._dtype.itemsize // 8)
        """Place where the list of slots begins behind a table, in elements of its own type, int64."""
        self._windows = Windows(group, (self._places + slots) * 8)
        self._windows.reserve(self._windows.capacity)
        self._rank, self._which = dist.get_rank(group), 0
        self._tables = [Table(self._get_rows(self._rank, which)) for which in range(2)]
        self._fill: tuple[Callable[[Table], None], np.ndarray] | None = None
        self._thread = ThreadPoolExecutor(1, "routed experts")
        assign(self.host_cache, buffer=self._tables[0])

    def _get_rows(self, rank: int, which: int) -> torch.Tensor:
        """Table ``which`` of ``rank``, ``[slots, layers, experts per token]``."""
        return self._windows.get_view(rank, which, 0, int(np.prod(self._shape)), self._dtype).view(self._shape)

    def _get_slots(self, rank: int, which: int) -> torch.Tensor:
        return self._windows.get_view(rank, which, self._places, self._shape[0], torch.int64)

    # -- SGLang's steps ------------------------------------------------------------------------------------

    def _get_local_slice(self, forward_batch: ForwardBatch, can_run_graph: bool, cuda_graph_batch: int | None):
        return super()._get_local_slice(forward_batch, can_run_graph, cuda_graph_batch).to(self._dtype)

    def get_topk(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().get_topk(*args, **kwargs).int()  # as its clients read it

    # -- a switch --------------------------------------------------------------------------------------------

    def publish(self, live: Sequence[LiveRequest], rows: Sequence[np.ndarray]) -> None:
        """Tell all ranks in which slots this leader has the tokens that may move, each once.

        Args:
            live: what this group offers; ``rows``: KV slots of their tokens, int64 ``[tokens]`` each.
        """
        self._tables[self._which].wait()
        slots = list_slots_once(live, rows)
        self._get_slots(self._rank, self._which)[: len(slots)] = torch.from_numpy(slots)

    def plan_copy(self, offers: Mapping[int, Sequence[LiveRequest]], plan: GroupPlan, place: np.ndarray) -> None:
        """Plan the rows that :meth:`turn` copies: of all tokens that come to the group which this rank will lead.

        Args:
            offers: what each old leader offers.
            plan: the group's plan; ``place``: slot of this rank for each slot of the plan.
        """
        which = self._which

        def fill(table: Table) -> None:
            for leader, live in offers.items():
                count = sum(one.tokens - one.shared for one in live)
                slots = self._get_slots(leader, which)[:count].numpy()
                old, new = match_slots(live, slots, plan.rows[leader])
                table.copy(self._get_rows(leader, which), old, place[new])

        self._fill = fill, place

    def turn(self, leads: bool) -> None:
        """Use the other table from now on, and begin to copy its rows if this rank ``leads`` a group."""
        self._which = 1 - self._which
        table = self._tables[self._which]
        assign(self.host_cache, buffer=table)
        if leads:
            assert self._fill is not None, "plan_copy comes first"
            fill, slots = self._fill
            table.await_rows(slots, lambda: self._thread.submit(fill, table))
