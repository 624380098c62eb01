"""Ranks of verl's trainer without Ray: steps with summed gradients, and verl's own on the same samples.

    python -m tests.integration.verl_gradients MODEL OUT [CASE ...]

One process for each rank, forked after verl is imported.  OUT gets, by case, how far the two are apart.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hydra import compose, initialize_config_module
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import response_from_nested

from sglang_pat.integrations.verl.gradient_sums import SummingWorker
from sglang_pat.integrations.verl.stream_lent import LentWorker
from sglang_pat.testing.ports import find_free_port

RANKS, SHARDS = 4, 2
PROMPTS, RESPONSES, STEPS = 6, 4, 3
SEQUENCES = PROMPTS * RESPONSES
ALONE = 2
"""Chunks that the second replica trains without the first."""
CASES: dict[str, tuple[str, ...]] = {
    "token-mean": (),
    "seq-mean-token-mean": ("use_kl_loss=true", "kl_loss_coef=0.1"),
    "seq-mean-token-sum-norm": ("loss_scale_factor=64", "entropy_coeff=0.01"),
    "token-sum of strided replicas": ("use_dynamic_bsz=true", "ppo_max_token_len_per_gpu=256"),
    "seq-mean-token-sum": ("fsdp_config.use_no_sync_for_gradient_accumulation=true",),
    "token-mean of interrupted chunks": ("ppo_micro_batch_size_per_gpu=1",),
    "seq-mean-token-mean with a reference policy": ("use_kl_loss=true", "kl_loss_coef=0.3"),
    "token-mean of one replica": (
        "fsdp_config.fsdp_size=-1", "fsdp_config.param_offload=true", "fsdp_config.optimizer_offload=true",
    ),
}  # fmt: skip
"""Overrides of ``actor_rollout_ref.actor``, by ``loss_agg_mode``."""


def make_config(model: str, overrides: tuple[str, ...]) -> Any:
    actor = [
        "strategy=fsdp2", "optim.lr=1e-4", f"ppo_mini_batch_size={PROMPTS}", "ppo_micro_batch_size_per_gpu=2",
        "fsdp_config.use_torch_compile=false", "fsdp_config.model_dtype=fp32", f"fsdp_config.fsdp_size={SHARDS}",
    ]  # fmt: skip
    precision = "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "ppo_trainer",
            [
                f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.model.use_remove_padding=false",
                "actor_rollout_ref.model.enable_gradient_checkpointing=false",
                "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
                f"actor_rollout_ref.rollout.n={RESPONSES}",
                f"actor_rollout_ref.rollout.tensor_model_parallel_size={RANKS}",
                "actor_rollout_ref.rollout.name=sglang",
                "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=3",
                "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=256",
                "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=${actor_rollout_ref.actor.use_dynamic_bsz}",
                f"+actor_rollout_ref.actor.fsdp_config.mixed_precision={precision}",
                f"+actor_rollout_ref.ref.fsdp_config.mixed_precision={precision}",
                f"actor_rollout_ref.ref.fsdp_config.fsdp_size={SHARDS}",
                "actor_rollout_ref.ref.fsdp_config.model_dtype=fp32",
                "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=3",
                *(f"actor_rollout_ref.actor.{text}" for text in (*actor, *overrides)),
            ],
        )  # fmt: skip
    return config.actor_rollout_ref


def make_samples(step: int) -> TensorDict:
    """Samples of a step: lengths of all kinds, some tokens that do not count, and one response of which none does."""
    draw = torch.Generator().manual_seed(step)

    def tokens(size: int) -> torch.Tensor:
        return torch.randint(5, 500, (size,), generator=draw)

    rows: list[dict[str, torch.Tensor]] = []
    for i in range(SEQUENCES):
        prompt = tokens(int(torch.randint(1, 9, (), generator=draw)))
        response = tokens(int((torch.randn((), generator=draw) + 2.5).exp().clamp(2, 60)))
        mask = torch.ones_like(response) if i else torch.zeros_like(response)
        mask[len(response) // 2 : len(response) // 2 + i % 3] = 0  # a tool's answer
        whole = torch.cat([prompt, response])
        advantages = torch.randn((), generator=draw) * torch.ones(len(response))
        rows.append(
            dict(prompts=prompt, responses=response, input_ids=whole, position_ids=torch.arange(len(whole)))
            | dict(response_mask=mask, loss_mask=mask, advantages=advantages, ref_log_prob=-6 - advantages / 9)
            | dict(rollout_is_weights=torch.rand(len(response), generator=draw) + 0.5)
        )
    fields = {name: torch.nested.as_nested_tensor([row[name] for row in rows], layout=torch.jagged) for name in rows[0]}
    return TensorDict(fields, batch_size=SEQUENCES)


def select(data: TensorDict, rows: Any) -> TensorDict | None:
    rows = list(rows)
    return tu.index_select_tensor_dict(data, rows) if rows else None


def make_shares(data: TensorDict, step: int, alone: Sequence[int]) -> list[list[TensorDict | None]]:
    """Chunks in the order in which responses end, each with what every rank gets of it.

    The first chunks are for the ranks of the replica that trains ``alone``, the others for all.  Shares differ in size,
    and some are empty.
    """
    order = sorted(range(SEQUENCES), key=lambda i: len(data["responses"][i]))
    chunks = [order[:3], order[3:8], order[8:9], order[9:20], order[20:]]
    if step % 2:
        chunks.reverse()
    shares = []
    for number, chunk in enumerate(chunks):
        ranks = alone if number < ALONE else range(RANKS)
        parts = {rank: chunk[i :: len(ranks)] for i, rank in enumerate(ranks)}
        shares.append([select(data, parts.get(rank, ())) for rank in range(RANKS)])
    return shares


def record_gradients(worker: SummingWorker) -> list[torch.Tensor]:
    """What verl's engine is about to clip, of each step."""
    engine, found = worker.actor.engine, []
    step = engine.optimizer_step

    def recorded() -> float:
        found.append(torch.cat([p.grad.full_tensor().flatten().clone() for p in engine.module.parameters()]))
        return step()

    engine.optimizer_step = recorded
    return found


def collect_weights(worker: SummingWorker) -> torch.Tensor:
    values = worker.actor.engine.module.state_dict().values()
    return torch.cat([value.full_tensor().flatten() for value in values])


def update_as_verl(worker: SummingWorker, data: TensorDict, rank: int) -> dict[str, Any]:
    """verl's update of this rank, which recomputes the old log-probs."""
    own = tu.chunk_tensordict(data, RANKS)[rank]
    info = dict(temperature=1.0, calculate_entropy=worker.config.actor.entropy_coeff != 0, epochs=1)
    tu.assign_non_tensor(own, **info, compute_loss=False)
    found = worker.compute_log_prob(own.clone())
    own["old_log_probs"] = response_from_nested(found["log_probs"], own["response_mask"])
    tu.assign_non_tensor(own, global_batch_size=SEQUENCES, mini_batch_size=SEQUENCES, seed=1)
    return tu.get(worker.update_actor(own), "metrics")


def make_reference(config: Any, rank: int) -> SummingWorker:
    """A reference policy that is another one than the policy at its start."""
    worker = SummingWorker(config, "ref")
    worker.init_model()
    with torch.no_grad():
        for parameter in worker.ref.engine.module.parameters():
            parameter.mul_(1.1)
    return worker


def add_reference(worker: SummingWorker, data: TensorDict, rank: int) -> TensorDict:
    """Log-probs as verl computes them, in a pass of all ranks."""
    own = tu.chunk_tensordict(data, RANKS)[rank]
    tu.assign_non_tensor(own, temperature=1.0, calculate_entropy=False, compute_loss=False)
    found = response_from_nested(worker.compute_ref_log_prob(own)["log_probs"], own["response_mask"])
    parts: list[Any] = [None] * RANKS
    dist.all_gather_object(parts, list(found.unbind()))
    rows = [row for part in parts for row in part]
    return data.clone(recurse=False).update({"ref_log_prob": torch.nested.as_nested_tensor(rows, layout=torch.jagged)})


def add_interrupted(worker: SummingWorker, shares: list[TensorDict | None], rank: int, asked: bool) -> None:
    """The gradients of a chunk that is interrupted before its second pass; other ranks go on with what is left."""
    asks = iter(range(9))
    worker.actor.is_interrupted = lambda: next(asks) > 0
    rows = worker.add_gradients(shares[rank]).rows if asked else []
    worker.actor.is_interrupted = None
    parts: list[Any] = [None] * RANKS
    dist.all_gather_object(parts, rows)
    assert max(map(len, parts)) == min(2, max(len(share) for share in shares if share is not None)), "two passes"
    share, done = [*zip(shares, parts, strict=True)][(rank + 1) % RANKS]
    worker.add_gradients(None if share is None else select(share, sorted({*range(len(share))} - {*done})))


def compare(config: Any, rank: int, kind: type[SummingWorker], name: str) -> dict[str, Any]:
    """Both kinds of step, from the same weights: how far gradients and weights are apart, relative to their norm."""
    torch.manual_seed(0)
    ours, theirs = kind(config, "actor"), SummingWorker(config, "actor")
    for worker in (ours, theirs):
        worker.init_model()
    reference = make_reference(config, rank) if "reference" in name else None
    if reference:
        ours.actor.reference = reference.ref
    replicas = ours.actor.engine.device_mesh.mesh.reshape(-1, ours.actor.engine.device_mesh.size(-1)).tolist()
    (own,) = (replica for replica in replicas if rank in replica)
    before = collect_weights(ours)
    gradients, expected = record_gradients(ours), record_gradients(theirs)
    metrics: list[Any] = []
    for step in range(STEPS):
        data = make_samples(step)
        ours.begin_step()
        given = data
        if reference:
            given, data = data.exclude("ref_log_prob"), add_reference(reference, data, rank)
        for shares in make_shares(given, step, replicas[-1]):
            # A replica without samples may be asked, or not: the other trains in any case.
            asked = step == 0 or any(shares[one] is not None for one in own)
            if "interrupted" in name:
                add_interrupted(ours, shares, rank, asked)
            elif asked:
                ours.add_gradients(shares[rank])
        found = tu.get(ours.finish_step(SEQUENCES), "metrics")
        metrics.append([found, update_as_verl(theirs, data, rank)])
    weights = collect_weights(theirs)

    def apart(one: torch.Tensor, other: torch.Tensor) -> float:
        return ((one - other).norm() / other.norm()).item()

    return {
        "gradients": [apart(one, other) for one, other in zip(gradients, expected, strict=True)],
        "norms": [gradient.norm().item() for gradient in expected],
        "weights": apart(collect_weights(ours), weights),
        "moved": apart(before, weights),
        "metrics": metrics,
    }


def collect_errors(config: Any, rank: int) -> list[str]:
    """What calls at a wrong time, and wrong numbers, say."""
    worker = SummingWorker(config, "actor")
    worker.init_model()
    shares = make_shares(make_samples(0), 0, range(RANKS))[0]

    def begin() -> None:
        worker.begin_step()
        worker.begin_step()

    def finish() -> None:
        worker.add_gradients(shares[rank])
        worker.finish_step(4)

    calls = [lambda: worker.add_gradients(None), lambda: worker.finish_step(0), begin, finish]
    found = []
    for call in [*calls, lambda: worker.finish_step(SEQUENCES + 1)]:
        try:
            call()
            found.append("")
        except RuntimeError as error:
            found.append(str(error))
    return found


def run_rank(rank: int, port: int, model: str, out: str, *cases: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(RANKS), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name in cases or CASES:
        kind = LentWorker if "strided" in name else SummingWorker
        found[name] = compare(make_config(model, (f"loss_agg_mode={name.split()[0]}", *CASES[name])), rank, kind, name)
    found["errors"] = collect_errors(make_config(model, ()), rank)
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.start_processes(run_rank, args=(find_free_port(), *sys.argv[1:]), nprocs=RANKS, start_method="fork")
