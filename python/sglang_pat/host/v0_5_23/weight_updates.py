"""Whole updates: SGLang updates by a component of its scheduler, which asks the worker for the tensors."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
from sglang.srt.model_executor.model_runner_components.weight_updater import LocalSerializedTensor

from sglang_pat.host.assign import assign
from sglang_pat.host.fixes.weight_updates import ExpectingTpModelWorker

__all__ = ["LocalSerializedTensor"]


class WholeUpdatesTpModelWorker(ExpectingTpModelWorker):
    """SGLang's ``TpModelWorker``, of which all ranks of the engine take all tensors of a request, or none does."""

    _opened: Any = None

    def expect(self, empty: torch.nn.Module) -> None:
        super().expect(empty)
        # Groups for updates have this rank by its number in the engine.
        runner = self.model_runner
        assign(runner, weight_updater=dataclasses.replace(runner.weight_updater, tp_rank=self.rank))

    def open(self, recv_req: UpdateWeightsFromTensorReqInput) -> str | None:
        """Open what a request brought for this rank, for the next call of :meth:`deserialize_own_rank`.

        Returns:
            Why no rank takes it, in one line; None if all do.
        """
        self._opened, problem = self.open_together(recv_req)
        return problem

    def deserialize_own_rank(self, serialized_named_tensors: Any) -> Any:
        # LoRA adapters, for which SGLang calls this too, are refused.
        opened, self._opened = self._opened, None
        return opened
