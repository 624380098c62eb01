"""Run by test_routed_experts.py as a program of its own: an engine of four ranks that overlaps, without a tokenizer."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import sglang_pat
from sglang_pat.launch import processes
from sglang_pat.rollout.records import Group

from .rollout_calls import admitter
from .streams import GREEDY


async def switch_meanwhile(engine: Any, bodies: dict[str, Any], steps: dict[str, int]) -> list[dict[str, Any]]:
    manager = engine.tokenizer_manager
    entries = [{"tp": tp, "arrived": len(bodies["input_ids"]), "step": int(step)} for step, tp in steps.items()]
    await manager.pat_set_schedule(entries)
    work = asyncio.ensure_future(engine.async_generate(**bodies))
    assert len((await manager.pat_get_schedule())["switches"]) == len(entries)
    return await work


def main(model: str, bodies: str, steps: str) -> None:
    processes.fork_here()
    engine = sglang_pat.Engine(
        model_path=model, tp_size=1, dp_size=4, adaptive_tp=True, pat_policy="schedule", pat_cpu_overlap=True,
        dtype="float32", max_total_tokens=20000, random_seed=1, log_level="error", skip_tokenizer_init=True,
        enable_return_routed_experts=True,
    )  # fmt: skip
    answers = engine.loop.run_until_complete(switch_meanwhile(engine, json.loads(bodies), json.loads(steps)))
    print(json.dumps([(answer["output_ids"], answer["meta_info"]["routed_experts"]) for answer in answers]))
    engine.reconfigure(tp=1)
    groups = list(engine.rollout(admitter(0, 1, 2, eta_prompts=1.0), GREEDY | {"max_new_tokens": 30}, version=0))
    kept = [(group, sample.output) for group in groups if isinstance(group, Group) for sample in group.list_kept()]
    found = [(group.prompt["input_ids"], out.token_ids, out.routed_experts.hex()) for group, out in kept]
    print(json.dumps(found))
    engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
