"""Reward functions that misbehave in every way: each costs its own sample, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from reward_sandbox import pool as pools
from reward_sandbox.pool import Failure, RewardPool

pytestmark = pytest.mark.unit

FAILED = -1.0
ROOT = Path(__file__).resolve().parents[2]


class Unpicklable(Exception):
    """Cannot be made anew from its arguments."""

    def __init__(self, one, other):
        super().__init__(one)


def behave(how: str, once: str = "") -> object:
    """A reward function.  ``once``: a file that says whether it was called before."""
    if once:
        if Path(once).exists():
            return 0.5
        Path(once).touch()
    match how:
        case "hang":
            threading.Event().wait()
        case "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            threading.Event().wait()
        case "spin":
            while True:
                pass
        case "memory":
            kept = []
            while True:
                kept.append(bytearray(1 << 20))
        case "leave":
            os._exit(0)
        case "leave a child":
            os.fork() or threading.Event().wait()
            os._exit(0)
        case "fork":
            if child := os.fork():
                os.waitpid(child, 0)
                return 0.5
            return 0.75
        case "raise":
            raise Unpicklable("two\nlines", 2)
        case "exit":
            sys.exit(3)
        case "die":
            os._exit(3)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
    return {
        "number": 0.25, "true": True, "nan": math.nan, "none": None, "text": "1.0", "dict": {"score": 1, "acc": 0.5},
        "no score": {"acc": 1}, "no number": {"score": math.inf}, "closure": {"score": 1, "more": lambda: 0},
    }[how]  # fmt: skip


@pytest.fixture
async def pool():
    before = set(psutil.Process().children())
    made = RewardPool(behave, processes=2, limit=60, failed_reward=FAILED)
    yield made
    await made.close()
    after = set(psutil.Process().children()) - before
    assert not [child for child in after if child.status() != psutil.STATUS_ZOMBIE], "its processes have ended"


async def test_scores(pool):
    assert (await pool.score({"how": "number"})).value == 0.25
    assert (await pool.score({"how": "true"})).value == 1.0
    with_more = await pool.score({"how": "dict"})
    assert with_more.value == 1.0 and with_more.info == {"score": 1, "acc": 0.5} and with_more.failure is None


FAILURES = {
    "hang": (Failure.LATE, "longer than 0.3 s"),
    "stubborn": (Failure.LATE, "longer than 0.3 s"),
    "raise": (Failure.RAISED, "Unpicklable: two lines"),
    "exit": (Failure.RAISED, "SystemExit: 3"),
    "die": (Failure.DIED, "its process ended with code 3"),
    "killed": (Failure.DIED, "its process ended with code -9"),
    "nan": (Failure.INVALID, "it returned float nan: "),
    "none": (Failure.INVALID, "it returned NoneType None: "),
    "text": (Failure.INVALID, "it returned str '1.0': "),
    "no score": (Failure.INVALID, "it returned dict {'acc': 1}: "),
    "no number": (Failure.INVALID, "it returned dict {'score': inf}: "),
    "closure": (Failure.INVALID, "it returned dict {'score': 1, 'more': <function"),
}


async def test_a_failure_costs_its_own_sample(pool):
    """All at once, and right ones among them."""
    hows = [how for failing in FAILURES for how in (failing, "number")]
    late = {how for how, (failure, _) in FAILURES.items() if failure is Failure.LATE}
    found = await asyncio.gather(*(pool.score({"how": how}, 0.3 if how in late else None) for how in hows))
    for how, reward in zip(hows, found, strict=True):
        failure, reason = FAILURES.get(how, (None, ""))
        assert (reward.value, reward.failure) == (0.25 if failure is None else FAILED, failure), how
        assert reward.reason.startswith(reason) and "\n" not in reward.reason
        assert reward.running < pools.START_SECONDS / 4, "no process that ignores SIGTERM is waited for"


async def test_a_call_whose_process_is_killed_is_made_again(pool, tmp_path):
    assert (await pool.score({"how": "killed", "once": str(tmp_path / "called")})).value == 0.5


async def test_processes_that_are_killed_while_they_are_idle(pool):
    await pool.score({"how": "number"})
    for child in psutil.Process().children():
        child.kill()
    assert (await pool.score({"how": "number"})).value == 0.25


async def test_a_process_that_does_not_start_is_given_up(pool, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(pools, "START_SECONDS", 0.1)
        patched.setattr(pools, "_serve", lambda *given: threading.Event().wait())
        found = await pool.score({"how": "number"})
    assert found.failure is Failure.DIED and found.reason.endswith("or was not there in 0.1 s")
    assert (await pool.score({"how": "number"})).value == 0.25


async def test_a_machine_without_room_for_a_process_costs_the_sample(pool, monkeypatch):
    def refuse() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fork", refuse)
        found = await pool.score({"how": "number"})
    assert found.failure is Failure.DIED and found.reason.startswith("its process was not started: BlockingIOError")
    assert (await pool.score({"how": "number"})).value == 0.25


@pytest.mark.parametrize(("how", "number"), [("hang", 5), ("spin", 3)])
async def test_calls_that_hang_or_compute_for_long_hold_no_process_from_others(monkeypatch, how, number):
    """A second of the limit of ten minutes would be too long for them to be over."""
    if how == "spin":
        monkeypatch.setattr(pools, "LONG", 0.0005)
    pool = RewardPool(behave, processes=1, limit=600)
    calls = [asyncio.create_task(pool.score({"how": how})) for _ in range(number)]
    assert (await asyncio.wait_for(pool.score({"how": "number"}), 60)).value == 0.25
    assert not any(call.done() for call in calls)
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    await pool.close()


async def test_calls_that_compute_are_no_more_than_processes():
    pool = RewardPool(behave, processes=1, limit=600)
    calls = [asyncio.create_task(pool.score({"how": "spin"})) for _ in range(2)]
    await asyncio.sleep(10 * pools.LOOK_SECONDS)
    assert [call.holds for call in pool._calls] == [True] and len(pool._queue) == 1
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    await pool.close()


async def test_as_many_wait_at_once_as_extra_says(tmp_path):
    """All have to be there before any goes on, as for a remote judge."""
    pool = RewardPool(meet, processes=1, extra=7, limit=60)
    found = await asyncio.gather(*(pool.score({"folder": str(tmp_path), "name": str(n), "all": 8}) for n in range(8)))
    assert [reward.value for reward in found] == [1.0] * 8
    await pool.close()


def meet(folder: str, name: str, all: int) -> float:
    (Path(folder) / name).touch()
    while len(os.listdir(folder)) < all:
        time.sleep(0.05)
    return 1.0


async def test_too_much_memory_is_a_failure_of_its_own():
    pool = RewardPool(behave, processes=1, limit=60, memory=64 << 20, failed_reward=FAILED)
    found = await pool.score({"how": "memory"})
    assert (found.failure, found.value, found.reason) == (Failure.MEMORY, FAILED, "more than 64 MiB (setting memory)")
    assert (await pool.score({"how": "number"})).value == 0.25
    await pool.close()


async def test_a_process_that_ends_with_code_0_has_died():
    """Found by its end, and not by the limit; also if a child of it lives on."""
    pool = RewardPool(behave, processes=1, limit=600)
    for how in ("leave", "leave a child"):
        found = await asyncio.wait_for(pool.score({"how": how}), 60)
        assert (found.failure, found.reason) == (Failure.DIED, "its process ended with code 0")
    await pool.close()


async def test_a_child_that_comes_back_gives_no_answer():
    pool = RewardPool(behave, processes=1, limit=60)
    assert [(await pool.score({"how": how})).value for how in ("fork", "number")] == [0.5, 0.25]
    await pool.close()


async def test_cancelling_ends_a_call():
    """The next one would wait for its process otherwise."""
    pool = RewardPool(behave, processes=1, limit=600)
    running, waiting = (asyncio.create_task(pool.score({"how": "hang"})) for _ in range(2))
    await asyncio.sleep(0)
    waiting.cancel()
    running.cancel()
    reward = await pool.score({"how": "number"})
    assert reward.value == 0.25 and running.cancelled() and waiting.cancelled()
    await pool.close()


async def test_arguments_that_cannot_be_pickled(pool):
    found = await pool.score({"how": lambda: 0})
    assert found.failure is Failure.INVALID and found.reason.startswith("its arguments cannot be pickled: ")


async def test_times():
    """None waits of as many calls as processes; a third one waits for what one of these takes."""
    pool = RewardPool(behave, processes=2, extra=0, limit=0.3)
    rewards = await asyncio.gather(*(pool.score({"how": "hang"}) for _ in range(3)))
    assert max(reward.waiting for reward in rewards[:2]) < 0.3 <= min(reward.running for reward in rewards)
    assert rewards[2].waiting >= 0.3
    await pool.close()


async def ask(how: str, meet: asyncio.Barrier) -> float:
    """A reward function that asks somebody else."""
    await meet.wait()
    if how == "hang":
        await asyncio.Event().wait()
    if how == "raise":
        raise Unpicklable("two\nlines", 2)
    if how == "exit":
        sys.exit(3)
    return math.nan if how == "nan" else 0.5


async def test_coroutine_functions_are_called_in_the_loop_all_at_once():
    pool, meet = RewardPool(ask, processes=1, limit=0.1, failed_reward=FAILED), asyncio.Barrier(5)
    hows = ("hang", "raise", "exit", "nan", "right")
    found = await asyncio.gather(*(pool.score({"how": how, "meet": meet}) for how in hows))
    kinds = [Failure.LATE, Failure.RAISED, Failure.RAISED, Failure.INVALID, None]
    assert [reward.failure for reward in found] == kinds and found[2].reason == "SystemExit: 3"
    assert [reward.value for reward in found] == [FAILED] * 4 + [0.5]


async def test_a_coroutine_function_of_other_arguments_has_raised():
    found = await RewardPool(ask, processes=1).score({"how": "right"})
    assert found.failure is Failure.RAISED and found.reason.startswith("TypeError: ")


async def test_spawned_processes_import_the_function():
    pool = RewardPool(math.sqrt, processes=1, start="spawn", limit=60)
    assert (await pool.score({})).failure is Failure.RAISED  # it takes no arguments by name
    await pool.close()


def start_another(line: str, how: str) -> object:
    """A reward function with a child, whose stdout is the file ``line``; there it says which process it is."""
    with open(line, "w") as file:
        child = subprocess.Popen(["sleep", "600"], stdout=file)
        file.write(f"{child.pid}\n")
    return behave({"late": "hang", "cancelled": "hang", "died": "killed", "returns": "number"}[how])


class Line:
    """A pipe with a name, which ends when all that have opened it have ended."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path, self.fd = str(path), os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def wait_for(self, event: int) -> bool:
        poll = select.poll()
        poll.register(self.fd, event)
        return any(found & event for _, found in poll.poll(20_000))


@pytest.fixture
def line(tmp_path) -> Iterator[Line]:
    made = Line(tmp_path / "line")
    yield made
    with open(made.fd) as file:
        for pid in map(int, file):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # else it would sleep on after a test that failed


@pytest.mark.parametrize("how", ["late", "cancelled", "died", "returns"])
async def test_what_a_call_has_started_ends_with_it(line, how):
    pool = RewardPool(start_another, processes=1, limit=1.0 if how == "late" else 600.0)
    call = asyncio.create_task(pool.score({"line": line.path, "how": how}))
    assert await asyncio.to_thread(line.wait_for, select.POLLIN)
    if how == "cancelled":
        call.cancel()
    else:
        assert (await call).failure == (None if how == "returns" else how)
    if how == "returns":
        await pool.close()
    assert await asyncio.to_thread(line.wait_for, select.POLLHUP), "nobody has it open any more"
    await pool.close()


JOB = """
import asyncio, sys
from reward_sandbox.pool import RewardPool
from tests.unit.test_reward_pool import start_another
async def main():
    pool = RewardPool(start_another, processes=1, limit=600, start=sys.argv[2])
    await pool.score({"line": sys.argv[1], "how": "late"})
if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.parametrize("start", pools.STARTS)
def test_what_a_call_has_started_ends_with_the_job(line, tmp_path, start):
    (script := tmp_path / "job.py").write_text(JOB)
    command = [sys.executable, str(script), line.path, start]
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": f"{ROOT / 'python'}:{ROOT}"}) as job:
        assert line.wait_for(select.POLLIN)
        job.kill()
    assert line.wait_for(select.POLLHUP)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"processes": 0}, "processes is 0, must be 1 or more"),
        ({"extra": -1}, "extra is -1, must be 0 or more"),
        ({"memory": 0}, "memory is 0, must be bytes, 1 or more"),
        ({"limit": 0}, "limit is 0, must be seconds above 0"),
        ({"limit": math.inf}, "limit is inf, must be seconds above 0"),
        ({"failed_reward": math.nan}, "failed_reward is nan, must be a finite number"),
        ({"start": "thread"}, "start is 'thread', must be fork or spawn"),
        ({"start": "spawn", "function": lambda: 0}, "start is 'spawn', for which <function"),
    ],
)
def test_refused_in_one_line(given, said):
    with pytest.raises(ValueError) as refused:
        RewardPool(**{"function": behave, "processes": 1} | given)
    assert str(refused.value).startswith(said) and "\n" not in str(refused.value)


ABANDONED = """
import asyncio, gc
from reward_sandbox.pool import RewardPool

async def work():
    pools = [RewardPool(abs_of, processes=2, extra=0) for _ in range(3)]
    await asyncio.gather(*(pool.score({"x": -i}) for pool in pools for i in range(4)))

def abs_of(x):
    return abs(x)

asyncio.run(work())
gc.collect()
print("over", flush=True)
"""


def test_a_program_that_forgets_to_close_its_pools_ends():
    """Nobody refers to them any more, and their processes wait for calls."""
    done = subprocess.run(
        [sys.executable, "-c", ABANDONED], capture_output=True, text=True, timeout=30,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'python'}"},
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout == "over\n", done.stderr
