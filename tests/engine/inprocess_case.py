"""Run by test_inprocess.py in a process of its own, since it patches SGLang: an engine that is asked, and left."""

from __future__ import annotations

import asyncio
import json
import sys
from unittest.mock import AsyncMock

from sglang_pat.cpu import shim
from sglang_pat.launch import processes

FOREVER = {"temperature": 0.0, "ignore_eos": True}


async def ask(engine, prompt: int, **sampling) -> int | str:
    """Tokens of the answer to a prompt of so many, or what was said instead."""
    try:
        answer = await engine.generate([5 + i % 50 for i in range(prompt)], FOREVER | sampling, False)
    except ValueError as error:
        return str(error)
    return len(answer["output_ids"])


async def leave(engine) -> int:
    """Ask for a long answer, go once it has begun, and have the memory released; what the engine has then."""
    await engine._manager.pat_set_schedule([{"arrived": 1}])
    asked = asyncio.ensure_future(ask(engine, 3))
    await engine._manager.pat_get_schedule()
    asked.cancel()
    await asyncio.wait([asked])
    await engine.release_memory(["kv_cache"])
    return len(engine._manager.rid_to_state)


async def main(model: str, context: int) -> None:
    from sglang_pat.host import adapter
    from sglang_pat.server.attach import attach

    attach({"base_tp": 1, "policy": "schedule"}, "a test")
    from sglang_pat.host.inprocess import InProcessEngine

    arguments = {
        "model_path": model, "tp_size": 2, "dtype": "float32", "max_total_tokens": 20_000, "log_level": "error",
        "enable_memory_saver": False,
    }  # fmt: skip
    try:
        InProcessEngine(arguments | {"context_length": context + 1})
    except ValueError as error:
        too_long = str(error)
    engine = InProcessEngine(arguments | {"context_length": context})
    # The memory saver needs a GPU; what is waited for before it is asked does not.
    engine._manager.server_args = adapter.arguments.make_view(engine._manager.server_args, enable_memory_saver=True)
    engine._manager.release_memory_occupation_communicator = AsyncMock(return_value=[])
    found = {
        "too long": too_long,
        "answers": [await ask(engine, context - left) for left in (0, 1, 2, 7, 8)],
        "given": [await ask(engine, context - 4, max_new_tokens=most) for most in (2, 9)],
        "left": await leave(engine),
    }
    print(json.dumps(found), flush=True)
    engine._engine.shutdown()


if __name__ == "__main__":
    shim.ensure(children=True)
    processes.fork_here()
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
