"""Whole updates: SGLang's worker and model runner update by themselves."""

from __future__ import annotations

from sglang.srt.managers.io_struct import (
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
)
from sglang.srt.model_executor.model_runner import LocalSerializedTensor

from sglang_pat.host.fixes.weight_updates import ExpectingTpModelWorker

__all__ = ["LocalSerializedTensor"]


class WholeUpdatesTpModelWorker(ExpectingTpModelWorker):
    """SGLang's ``TpModelWorker``, of which all ranks of the engine take all tensors of a request, or none does."""

    def update_weights_from_tensor(self, recv_req: UpdateWeightsFromTensorReqInput) -> tuple[bool, str]:
        """Update as SGLang does, on all ranks together."""
        tensors, problem = self.open_together(recv_req)
        if problem is not None:
            return False, problem
        return self.model_runner.update_weights_from_tensor(tensors, recv_req.load_format)

    def update_weights_from_distributed(self, recv_req: UpdateWeightsFromDistributedReqInput) -> tuple[bool, str]:
        """Update as SGLang does; what does not fit is received all the same, since its sender waits for us."""
        with self.use_receiver() as received:
            received.check_lengths(recv_req.names, recv_req.shapes)
            success, message = super().update_weights_from_distributed(recv_req)
        return success, received.describe(success, message)

    def update_weights_from_ipc(self, recv_req: UpdateWeightsFromIPCReqInput) -> tuple[bool, str]:
        """Update as SGLang does; nothing is loaded from the first bucket on that does not fit."""
        with self.use_receiver() as received:
            success, message = super().update_weights_from_ipc(recv_req)
        return success, message if success else received.problem or message
