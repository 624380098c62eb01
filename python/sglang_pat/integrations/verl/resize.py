"""More or fewer engines for a verl job that runs, if its engines have GPUs of their own:

    python -m sglang_pat.integrations.verl.resize [ENGINES] [--job ID] [--address ADDRESS]

Without ENGINES it prints how many there are.  The number is kept by a Ray actor of the job, :class:`EngineCount`, which
the job's :class:`~.fleet.Fleet` reads before each update of the weights.
"""

from __future__ import annotations

import logging
import socket
import sys
from typing import Any

import ray
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from sglang_pat.tools import commands

NAMESPACE = "sglang_pat"
CONNECT_SECONDS = 10.0
"""Longest wait for an answer of a cluster."""
_NAME = "engines of job "


class EngineCount:
    """The number of engines that a job has, and the one that is wanted; a Ray actor.

    Args:
        present: number of engines at the start.
        fixed: why there cannot be another number; empty: there can.
    """

    def __init__(self, present: int, fixed: str) -> None:
        self._present, self._wanted, self._fixed, self._lacks = present, present, fixed, ""

    def get_wanted(self) -> int:
        return self._wanted

    def report(self, present: int, lacks: str) -> None:
        """Take in how many there are after an update, and what Ray lacks for more."""
        self._present, self._lacks = present, lacks

    def want(self, number: int) -> str:
        """Take in how many are wanted; returns why it is refused."""
        if not self._fixed:
            self._wanted = number
        return self._fixed

    def describe(self) -> str:
        line = f"{self._present} engine{'s' * (self._present != 1)}"
        if self._wanted != self._present:
            line += f", {self._wanted} from the next update of the weights"
        return f"{line}; {self._lacks}" if self._lacks else line


def publish(present: int, fixed: str) -> Any:
    """Make this job's :class:`EngineCount`; it ends with the job."""
    context = ray.get_runtime_context()
    here = NodeAffinitySchedulingStrategy(context.get_node_id(), soft=False)  # engines' nodes may go
    actor = ray.remote(num_cpus=0)(EngineCount)
    options = dict(name=_NAME + context.get_job_id(), namespace=NAMESPACE, scheduling_strategy=here)
    return actor.options(**options).remote(present, fixed)


def main(argv: list[str] | None = None) -> int:
    parser = commands.Parser(
        prog="python -m sglang_pat.integrations.verl.resize",
        description="More or fewer engines for a verl job that runs.",
    )
    parser.add_argument("engines", nargs="?", type=int, help="engines of the job from its next update of the weights")
    parser.add_argument("--job", metavar="ID", help="Ray's number of the job (default: the only one)")
    parser.add_argument("--address", default="auto", help="of the Ray cluster (default: the one of this machine)")
    args = parser.parse_args(argv)
    if args.engines is not None and args.engines < 1:
        raise commands.UsageError(f"ENGINES is {args.engines}, must be at least 1")
    try:
        host, colon, port = args.address.removeprefix("ray://").rpartition(":")
        if colon and port.isdecimal():  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
        ray.init(args.address, namespace=NAMESPACE, logging_level=logging.ERROR, log_to_driver=False)
    except (OSError, ValueError) as error:
        raise commands.UsageError(f"no Ray cluster at --address {args.address}: {error}") from None
    try:
        return _run(args.engines, args.job)
    finally:
        ray.shutdown()


def _run(engines: int | None, choice: str | None) -> int:
    actors = [actor["name"] for actor in list_named_actors(all_namespaces=True) if actor["namespace"] == NAMESPACE]
    jobs = sorted(name.removeprefix(_NAME) for name in actors if name.startswith(_NAME))
    if choice is not None and choice not in jobs:
        raise commands.UsageError(f"--job is {choice}, must be one of {', '.join(jobs) or 'none'}")
    if not jobs:
        raise commands.UsageError("no job of this cluster has engines of ours with GPUs of their own")
    if engines is not None and choice is None and len(jobs) > 1:
        raise commands.UsageError(f"there are {len(jobs)} jobs, say which: --job with one of {', '.join(jobs)}")
    for job in jobs if choice is None else [choice]:
        count = ray.get_actor(_NAME + job, NAMESPACE)
        if engines is not None and (refused := ray.get(count.want.remote(engines))):
            raise commands.UsageError(f"job {job} keeps its number of engines: {refused}")
        print(f"job {job}: {ray.get(count.describe.remote())}")
    return 0


if __name__ == "__main__":
    sys.exit(commands.run("resize", main))
