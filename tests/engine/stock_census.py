"""A stock SGLang engine that writes the census of its ranks.

python -m tests.engine.stock_census MODEL TP FOLDER ARGUMENTS
"""

from __future__ import annotations

import json
import os
import sys

from sglang_pat.cpu import shim

shim.ensure(children=True)

from sglang.srt.entrypoints.engine import Engine  # noqa: E402
from sglang.srt.managers import scheduler as stock  # noqa: E402

from sglang_pat.checks import census  # noqa: E402
from sglang_pat.host import adapter  # noqa: E402
from sglang_pat.host.groups import get_place  # noqa: E402
from sglang_pat.launch import processes  # noqa: E402
from sglang_pat.testing.prefork import fork_stock  # noqa: E402


def choose_tree() -> dict[str, str]:
    """Arguments with which this process builds the radix tree that our ranks have."""
    if adapter.FOLDER == "v0_5_12":
        return {}
    adapter.rank.register_tree()
    return {"radix_cache_backend": adapter.rank.TREE_BACKEND}


def run_recorded(*args, **kwargs) -> None:
    """SGLang's scheduler process, which writes its census before it serves."""
    choose_tree()
    loop = stock.Scheduler.run_event_loop

    def recorded(scheduler: stock.Scheduler) -> None:
        census.record(scheduler, get_place(scheduler)[0], epoch=0)
        loop(scheduler)

    stock.Scheduler.run_event_loop = recorded
    stock.run_scheduler_process(*args, **kwargs)


class RecordedEngine(Engine):
    run_scheduler_process_func = staticmethod(run_recorded)


def main(model: str, tp: str, folder: str, arguments: str) -> None:
    os.environ[census.CENSUS_ENV] = folder
    # One entry a rank, or SGLang asks for as many NUMA nodes.
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(rank % os.cpu_count()) for rank in range(int(tp)))
    fork_stock()
    engine = RecordedEngine(model_path=model, tp_size=int(tp), **json.loads(arguments) | choose_tree())
    engine.generate(input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 1})  # by then all ranks have written
    # Not shutdown(), which kills Python's resource tracker too: the ranks' segments would stay in shared memory.
    processes.end_children()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
