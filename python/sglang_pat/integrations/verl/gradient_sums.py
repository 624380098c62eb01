"""verl's trainer worker, for a step whose samples come in chunks (RollPacker, section 4.4).

A mean of means is no mean: the gradient of a step is divided by the tokens, or the responses, of the whole step.  So a
chunk adds a *sum* to the gradients, whatever its size, and :meth:`SummingWorker.finish_step` divides once.  The result
is that of verl's own ``update_actor`` on the same samples in one batch, apart from the order of additions.

With ``fsdp_size`` smaller than the number of ranks, FSDP2 keeps replicas of the model.  A replica may then train chunks
while the others do not: gradients cross replicas in ``finish_step`` only.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.single_controller.base.decorator import Dispatch, collect_all_to_all, dispatch_nd_compute, register
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.utils.metric import AggregationType, Metric
from verl.utils.seqlen_balancing import rearrange_micro_batches
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.utils.padding import response_from_nested

MESH = "actor"
"""verl's name of the ranks that train the policy."""


@dataclass
class Sums:
    """Sums of one rank in a step.

    Attributes:
        lengths: tokens of each sequence, prompt and response.
        tokens: number of tokens of responses that count in the loss.
        losses: verl's metrics that are parts of the loss; each multiplied by the number of ranks, as verl has it.
        weighted: verl's other metrics, each multiplied by the tokens that it is the mean of.
        seconds: time spent in forward and backward passes.
        rows: indices of the samples of the last chunk's share that were trained on.
    """

    rows: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    tokens: int = 0
    losses: Counter[str] = field(default_factory=Counter)
    weighted: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def add(self, other: Sums) -> None:
        self.lengths += other.lengths
        self.tokens += other.tokens
        self.losses.update(other.losses)  # adds; Counter's own + drops what is not positive
        self.weighted.update(other.weighted)
        self.seconds += other.seconds


class SummingTrainer(TrainingWorker):
    """One rank of the policy's trainer: ``begin_step``, ``add_gradients`` any number of times, ``finish_step``.

    The methods are collective: ``begin_step`` and ``finish_step`` over all ranks, ``add_gradients`` over the ranks of a
    replica.
    """

    engine: FSDPEngine
    reference: TrainingWorker | None = None
    """The reference policy, whose log-probs are then computed in the same pass; None: samples that need them have
    them."""
    is_interrupted: Callable[[], bool] | None = None
    """Whether a chunk ends after its next pass, and leaves the rest of its samples; asked on one rank of a replica."""
    _sums: Sums | None = None
    """Sums of the step that is under way."""

    def begin_step(self) -> None:
        """Forget gradients.

        Raises:
            RuntimeError: the last step has not been finished.
        """
        if self._sums is not None:
            raise RuntimeError("the gradients of a step are not finished: finish_step() comes before begin_step()")
        self._sums = Sums()
        self.engine.optimizer_zero_grad()

    def add_gradients(self, data: TensorDict | None) -> Sums:
        """Do the forward and backward passes of this rank's share of a chunk.

        All ranks of a replica do equally many passes, because they put the weights together in each.  A rank with less
        to do adds passes whose gradient is 0.  If no rank of the replica has anything, there is none.

        Args:
            data: as for verl's ``update_actor``: ``input_ids``, ``position_ids``, ``prompts``, ``responses``,
                ``response_mask``, ``loss_mask``, ``advantages``, ``temperature``, and what the loss reads besides.
                Without ``old_log_probs`` they are those of the same pass: the policy that generated the samples is the
                one that is trained, and the ratio is 1.  ``None``: no samples.

        Returns:
            What this rank has added.  If it was interrupted, ``rows`` lacks some.
        """
        if self._sums is None:
            raise RuntimeError("add_gradients() is for a step that has begun: begin_step() comes first")
        began = time.perf_counter()
        added = Sums()
        micro_batches = [] if data is None or not len(data) else self._split(data)
        passes = self._find_most(len(micro_batches))
        if passes:
            self._move_weights(get_device_name())
            reference = self.reference.engine.eval_mode() if self.reference else nullcontext()
            with self.engine.train_mode(disable_auto_offload=True, zero_grad_on_exit=False), reference:
                for i in range(passes):
                    last = i == passes - 1 or self._find_interrupted()
                    self._let_ranks_add(last)
                    if i < len(micro_batches):
                        rows, micro_batch = micro_batches[i]
                        self._run(micro_batch, added)
                        added.rows += rows
                    else:
                        self._run_empty(with_reference=True)
                    if last:
                        break
            self._move_weights("cpu")
        added.seconds = time.perf_counter() - began
        self._sums.add(added)
        return added

    def finish_step(self, sequences: int, divisor: int | None) -> TensorDict:
        """Divide the sums of all ranks, clip, update the weights, and set the next learning rate.

        Args:
            sequences: number of sequences of this step's chunks, over all ranks.
            divisor: number by which the sums are divided; ``None``: the number of tokens that count in the loss.

        Returns:
            ``metrics``, named as ``update_actor`` names them.

        Raises:
            RuntimeError: the ranks have trained on more, or fewer, sequences.
        """
        if self._sums is None:
            raise RuntimeError("finish_step() is for a step that has begun: begin_step() comes first")
        own, self._sums = self._sums, None
        parts: list[Any] = [None] * self.engine.get_data_parallel_size()
        dist.all_gather_object(parts, own, group=self.engine.get_data_parallel_group())
        total = Sums()
        for part in parts:
            total.add(part)
        if len(total.lengths) != sequences:
            raise RuntimeError(f"{sequences} sequences were given in this step, {len(total.lengths)} were trained on")
        divisor = max(total.tokens, 1) if divisor is None else divisor
        with self.engine.train_mode(zero_grad_on_exit=True):
            self.engine.module.set_requires_all_reduce(True)  # from replica to replica
            if self.engine.device_mesh.ndim > 1:  # replicas: FSDP2 adds their sums in a backward pass
                self._run_empty()
            for parameter in self.engine.module.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(divisor)
            grad_norm = self.engine.optimizer_step()
        self.profiler.step()  # verl's counts updates
        metrics: dict[str, Any] = {"grad_norm": grad_norm, "lr": self.engine.lr_scheduler_step()}
        output = self._postprocess_output(
            {"metrics": metrics, "loss": [own.losses["loss"] / divisor]}, global_token_num=total.lengths,
            delta_time=own.seconds, forward_only=False, images_seqlens=None,
        )  # fmt: skip
        all_metrics = tu.get(output, "metrics")
        for name, value in total.losses.items():
            if name != "loss":
                all_metrics[name] = value / len(parts) / divisor
        for name, value in total.weighted.items():
            all_metrics[name] = value / max(total.tokens, 1)
        return tu.get_tensordict({}, {"metrics": all_metrics})

    def _split(self, data: TensorDict) -> list[tuple[list[int], TensorDict]]:
        """Split into micro-batches, each with the indices of its rows, by verl's settings; without verl's agreement of
        all ranks on their number."""
        tu.maybe_fix_3d_position_ids(data)
        config = self.engine_config
        tu.assign_non_tensor(
            data, use_remove_padding=self.model_config.get("use_remove_padding", False),
            use_fused_kernels=config.use_fused_kernels, sp_size=1, dp_size=self.engine.get_data_parallel_size(),
            batch_num_tokens=1, global_batch_size=1,  # so that verl's loss is a sum
        )  # fmt: skip
        if config.use_dynamic_bsz:
            micro_batches, rows = rearrange_micro_batches(data, config.max_token_len_per_gpu)
            return list(zip(rows, micro_batches, strict=True))
        parts = torch.arange(len(data)).split(config.micro_batch_size_per_gpu)
        return [(rows.tolist(), tu.index_select_tensor_dict(data, rows)) for rows in parts]

    def _move_weights(self, device: str) -> None:
        """Move weights and gradients, if they wait on the host.  verl's own way moves what the optimizer keeps, too."""
        if self.engine.is_param_offload_enabled:
            self.engine.to(device, model=True, optimizer=False, grad=True)

    def _find_most(self, number: int) -> int:
        """The largest of the numbers that the ranks of a replica have."""
        most = torch.tensor(number, device=get_device_id())
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.engine.device_mesh.get_group("fsdp"))
        return int(most.item())

    def _find_interrupted(self) -> bool:
        if self.is_interrupted is None:
            return False
        asks = dist.get_rank(self.engine.device_mesh.get_group("fsdp")) == 0
        return bool(self._find_most(int(asks and self.is_interrupted())))

    def _let_ranks_add(self, last: bool) -> None:
        """Have the ranks of a replica add up in the next backward pass: in each, or in the last of a chunk, by verl's
        setting."""
        module = self.engine.module
        module.set_requires_gradient_sync(last or not self.engine_config.use_no_sync_for_gradient_accumulation)
        module.set_requires_all_reduce(False)  # which the line above has set, too

    def _run(self, micro_batch: TensorDict, added: Sums) -> None:
        if self.reference is not None:
            log_probs = self._compute_reference(micro_batch)
            micro_batch["ref_log_prob"] = response_from_nested(log_probs, micro_batch["response_mask"])
        tokens = int(micro_batch["loss_mask"].values().sum())
        loss, output = self.engine.forward_step(micro_batch, loss_function=self._compute_loss, forward_only=False)
        loss.backward()
        added.lengths += micro_batch["input_ids"].offsets().diff().tolist()
        added.tokens += tokens
        added.losses["loss"] += output["loss"]
        for name, value in output["metrics"].items():
            if isinstance(value, Metric) and value.aggregation is AggregationType.SUM:
                added.losses[name] += value.aggregate()
            else:
                added.weighted[name] += tokens * (value.aggregate() if isinstance(value, Metric) else value)

    def _compute_loss(self, model_output: dict[str, Any], data: TensorDict, dp_group: Any = None) -> Any:
        if "old_log_probs" not in data.keys():
            log_probs = model_output["log_probs"].detach()
            data["old_log_probs"] = response_from_nested(log_probs, data["response_mask"])
        assert self.loss_fn is not None
        return self.loss_fn(model_output=model_output, data=data, dp_group=dp_group)

    def _compute_reference(self, micro_batch: TensorDict) -> torch.Tensor:
        """Log-probs of the reference policy, of prompts and responses (nested)."""
        assert self.reference is not None
        inputs = micro_batch.clone(recurse=False)
        tu.assign_non_tensor(inputs, calculate_entropy=False)
        with torch.no_grad():
            _, output = self.reference.engine.forward_step(inputs, loss_function=None, forward_only=True)
        return output["model_output"]["log_probs"]

    def _run_empty(self, with_reference: bool = False) -> None:
        """Do a pass over two tokens that adds nothing."""
        tokens = torch.nested.nested_tensor([torch.tensor([0, 0])], layout=torch.jagged)
        places = torch.nested.nested_tensor([torch.tensor([0, 1])], layout=torch.jagged)
        row = TensorDict({"input_ids": tokens, "position_ids": places}, batch_size=1)
        tu.assign_non_tensor(
            row, temperature=1.0, use_remove_padding=self.model_config.get("use_remove_padding", False),
            use_fused_kernels=self.engine_config.use_fused_kernels,
        )  # fmt: skip

        def nothing(model_output: dict[str, Any], data: TensorDict, dp_group: Any = None) -> Any:
            return (model_output["log_probs"].values() * 0).sum(), {}

        if with_reference and self.reference is not None:
            self._compute_reference(row)
        loss, _ = self.engine.forward_step(row, loss_function=nothing, forward_only=False)
        loss.backward()


def _dispatch_shares(worker_group: Any, shares: Sequence[Any]) -> Any:
    """Give each data-parallel rank its share; verl's own way splits a batch into equal ones."""
    ranks = worker_group._dispatch_info.get(MESH)
    if ranks is None:
        ranks = worker_group._dispatch_info[MESH] = worker_group._query_dispatch_info(MESH)
    return dispatch_nd_compute(ranks, max(ranks) + 1, worker_group, list(shares))


class SummingWorker(ActorRolloutRefWorker):
    """verl's hybrid worker, whose actor is a :class:`SummingTrainer`.

    The trainer calls these methods of the worker group:

    - ``begin_step()``;
    - ``add_gradients(shares)``: a list, one share for each data-parallel rank, a ``KVBatchMeta``, a ``TensorDict`` or
      ``None``; comes back at once with a list of one future for each rank (:class:`Sums`).  Groups of responses need
      not stay on one rank: their advantages are known.  A replica whose ranks all have ``None`` does nothing;
    - ``finish_step(sequences)``: takes the number of this step's sequences over all shares; returns a list of
      ``metrics``, equal for all ranks.
    """

    actor_worker_cls = SummingTrainer

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def begin_step(self) -> None:
        self.actor.begin_step()

    @register(dispatch_mode={"dispatch_fn": _dispatch_shares, "collect_fn": collect_all_to_all}, blocking=False)
    def add_gradients(self, data: TensorDict | None) -> Sums:
        if data is not None:
            actor = self.config.actor
            tu.assign_non_tensor(
                data, temperature=self.config.rollout.temperature,
                calculate_entropy=actor.calculate_entropy or actor.entropy_coeff != 0,
            )  # fmt: skip
        return self.actor.add_gradients(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def finish_step(self, sequences: int) -> TensorDict:
        """Finish the step.  Raises RuntimeError for more sequences than one update of verl's has."""
        actor = self.config.actor
        most = actor.ppo_mini_batch_size * self.config.rollout.n
        if sequences > most:
            raise RuntimeError(
                f"{sequences} sequences were given in this step, at most {most} are one update of verl's: "
                "actor_rollout_ref.actor.ppo_mini_batch_size times actor_rollout_ref.rollout.n"
            )
        divisors = {"token-mean": None, "token-sum": 1}
        return self.actor.finish_step(sequences, divisors.get(actor.loss_agg_mode, most)).cpu()
