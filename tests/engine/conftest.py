"""Servers shared by the engine tests: one for each distinct set of flags, forked from an interpreter that has imported
SGLang already.  Tests of the start itself start theirs as a user does."""

from __future__ import annotations

import asyncio
import os
import subprocess
import zlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from sglang_pat.checks import faults
from sglang_pat.host import adapter
from sglang_pat.memory.memory_plan import read_available_memory
from sglang_pat.predict.profile import Fingerprint
from sglang_pat.testing import models
from sglang_pat.testing.prefork import Prefork, run
from sglang_pat.testing.server import Server, find_rank_processes

from . import stock_answers, weight_updates
from .made_up import fingerprint
from .marker_models import make_marker_model
from .streams import open_session

# The adapter has the name, too, but imports SGLang, which the tests run in processes of their own.
GRAPH_SIZES = {"v0_5_12": "--cuda-graph-bs"}.get(adapter.FOLDER, "--cuda-graph-bs-decode")
MODELS = Path(__file__).resolve().parents[2] / ".cache" / "models"
REHEARSAL = Path(__file__).resolve().parents[1] / "rehearsal"
"""A plug-in of SGLang's: decode graphs on a CPU."""
AS_ON_CUDA = f"--pat-cpu-overlap --pat-kv-exchange alltoall {GRAPH_SIZES} 1 2 3 4 8 --chunked-prefill-size 128".split()
"""CUDA's default configuration, but for the sizes: batches above 8 run without a graph."""
KEEP = 4
"""Servers that a worker keeps alive at once: 0.4 to 0.8 GiB each, and 2 to 7% of a core while they idle."""
ROOM = 2 << 30
"""Bytes of memory that must be free for another one, or those that were not used for longest are ended first."""

CHECKS = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_PAT_CHECK_AGREEMENT": "1",
    "SGLANG_PAT_CHECK_STEADY": "1",
    "SGLANG_PAT_CHECK_TOKENS": "1",
}
"""Every adaptive server checks itself: SGLang's leak checks, at rest and in every step; ranks of a group agree in every
step and after every switch; no switch makes what should have been made at start."""

SIDES = {
    "llama": (
        "agreement attributes smoke control sglang_routes drafts features same_tokens rollout rehearsal requests "
        "hostile commands python_api cramped threshold lending attach policies flags faults"
    ).split(),
    "others": (
        "profiler mixtures sampling same_numbers same_tokens experts routed_experts overrides weights weights_refused "
        "clients storm inprocess grpo judge acceptance start"
    ).split(),
}
"""The test files in two sides, in this order; two workers may run one each (``pytest -n 2 --dist loadgroup``).  A side
shares servers, ``llama`` stock SGLang's.  Tests of ``same_tokens`` say where they are.  ``faults`` ends its engines."""

_item = None  # the test that is running


def long(*values: Any) -> Any:
    """Parameters of a test that run with ``LONG=1`` only."""
    return pytest.param(*values, marks=pytest.mark.long)


def count_start() -> None:
    """Note that the running test starts an engine, for the table at the end (``tests/conftest.py``)."""
    _item.user_properties.append(("engine start", ""))


def tell(line: str) -> None:
    """Print ``line`` after all tests."""
    _item.user_properties.append(("told", line))


class CountedServer(Server):
    """A server whose start counts for the test file that needs it, and what tests alone ask of one."""

    def __init__(self, *args, **kwargs) -> None:
        count_start()
        super().__init__(*args, **kwargs)

    async def reconfigure_async(self, session: aiohttp.ClientSession, tp: int) -> tuple[int, dict[str, Any]]:
        """``(HTTP status, body)`` of ``/pat/reconfigure``."""
        async with session.post(self.url + "/pat/reconfigure", json={"tp": tp}) as response:
            return response.status, await response.json()

    async def set_schedule(self, session: aiohttp.ClientSession, *entries: dict[str, Any]) -> None:
        """Replace the schedule (``--pat-policy schedule``); without entries everything goes on freely."""
        async with session.post(self.url + "/pat/schedule", json=entries) as response:
            if response.status != 200:
                raise RuntimeError(f"/pat/schedule answered {response.status}: {await response.text()}")

    async def wait_for_schedule(self, session: aiohttp.ClientSession) -> dict[str, Any]:
        """Wait until the schedule is over; how it went (``sglang_pat.messages.ScheduleState``)."""
        async with session.get(self.url + "/pat/schedule") as response:
            state = await response.json()
            if response.status != 200 or state["done"] < state["entries"]:
                raise RuntimeError(f"/pat/schedule answered {response.status}: {state}")
            return state

    def find_rank_process(self, rank: int) -> psutil.Process:
        return find_rank_processes(self.list_children())[rank]


def _side(item, name: str) -> str:
    """Where the tests of this file run, or this test says that it does."""
    marked = item.get_closest_marker("xdist_group")
    sides = [side for side, files in SIDES.items() if name in files]
    if not sides or (len(sides) == 2) != bool(marked):
        raise pytest.UsageError(f"{item.path.name}: name it in one of the SIDES of {__file__}")
    return marked.args[0] if marked else sides[0]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    places = {}
    for item in items:
        if item.path.parent == Path(__file__).parent:
            name = item.path.stem.removeprefix("test_")
            side = _side(item, name)
            places[item] = list(SIDES).index(side), SIDES[side].index(name)
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.xdist_group(side))
    items.sort(key=lambda item: places.get(item, (len(SIDES), 0)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    global _item
    _item = item


FORGETS_RETRACTIONS = {"SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS": "1"}
"""SGLang keeps more KV free after a retraction, for hundreds of steps; then a test would see a single one."""


class Servers:
    """Starts servers on demand and keeps the last :data:`KEEP`."""

    def __init__(self, folder: Path, prefork: Prefork | None) -> None:
        self._folder = folder
        self.prefork = prefork
        self._alive: OrderedDict[tuple, Server] = OrderedDict()
        self.rehearsed = folder / "rehearsed"
        self.rehearsed.mkdir()

    def get(self, model: Path, *flags: str, **options) -> Server:
        key = (str(model), flags, repr(sorted(options.items())))
        for other in [other for other, server in self._alive.items() if server.process.poll() is not None]:
            self._alive.pop(other).stop()
        server = self._alive.pop(key, None)
        if server is None:
            if len(self._alive) >= KEEP:
                self._alive.popitem(last=False)[1].stop()
            self.make_room()
            server = CountedServer(model, *flags, **({"prefork": self.prefork, "folder": self._folder} | options))
        self._alive[key] = server
        return server

    def make_room(self) -> None:
        """End servers until there is memory for another engine; the last two stay, as a test may have them both."""
        while len(self._alive) > 2 and read_available_memory() < ROOM:
            self._alive.popitem(last=False)[1].stop()

    def adaptive(
        self, model: Path, dp: int = 2, *flags: str, tp: int = 1, env: dict[str, str] | None = None, **options
    ) -> Server:
        """An adaptive server that switches on request or by a schedule only, in its base layout of ``dp`` replicas of
        degree ``tp``, with all :data:`CHECKS`, and metrics if nothing else.  Test code may put a fault into its file
        (:func:`fault`)."""
        flags = flags or ("--enable-metrics",)
        digest = zlib.crc32(repr((str(model), tp, dp, flags, env, sorted(options.items()))).encode())
        fault_file = self._folder / f"fault-{digest:08x}"
        environment = CHECKS | {faults.ENV: f"@{fault_file}"} | (env or {})
        base = ("--tp", str(tp), "--dp", str(dp), "--adaptive-tp", "--pat-policy", "schedule")
        server = self.get(model, *base, *flags, env=environment, **options)
        server.fault_file, server.base_tp = fault_file, tp
        self._at_base(server)
        return server

    def as_on_cuda(self, model: Path, dp: int = 2, *flags: str, mistake: str = "") -> Server:
        """Make :meth:`adaptive` in CUDA's default configuration as far as a CPU can run it: overlap scheduling, an
        all-to-all for the KV, decode steps as graphs (``tests/rehearsal``).  What the ranks captured and replayed is in
        :attr:`rehearsed`.

        Args:
            mistake: that the engine is to make (``gpu_rehearsal.MISTAKES``).
        """
        env = {"GPU_REHEARSAL_MISTAKE": mistake} if mistake else {}
        return self.adaptive(model, dp, *AS_ON_CUDA, *flags, env=self.rehearsal | env)

    @property
    def rehearsal(self) -> dict[str, str]:
        """Environment of an engine as on CUDA; its flags are :data:`AS_ON_CUDA`."""
        return {"PYTHONPATH": str(REHEARSAL), "GPU_REHEARSAL": str(self.rehearsed)}

    @staticmethod
    def _at_base(server: Server) -> None:
        assert server.post("/pat/schedule", []).status_code == 200
        assert server.post("/pat/take_back_ranks").status_code == 200
        server.reconfigure(tp=server.base_tp)

    def victim(self, model: Path) -> Server:
        """An adaptive server of :meth:`adaptive` that may be killed: an idle one, which is given away, or a new one."""
        for key, server in self._alive.items():
            if hasattr(server, "fault_file") and server.process.poll() is None:
                self._at_base(server)
                return self._alive.pop(key)
        server = self.adaptive(model)
        self._alive.popitem()
        return server

    def give_away(self, server: Server) -> None:
        """Take a server from all other tests, so that it may be killed."""
        self._alive = OrderedDict((key, other) for key, other in self._alive.items() if other is not server)

    def stock(self, model: Path, max_total_tokens: int = 65536) -> Server:
        return self.get(model, max_total_tokens=max_total_tokens)

    def run(
        self, module: str, *argv: str, env: dict[str, str] | None = None, seconds: float = 1000
    ) -> subprocess.CompletedProcess[str]:
        """``python -m module argv``, a program with an engine of its own, until it ends."""
        count_start()
        return run(self.prefork, module, argv, os.environ | (env or {}), seconds)

    def stop(self) -> None:
        for server in self._alive.values():
            server.stop()


@contextmanager
def fault(server: Server, spec: str) -> Iterator[None]:
    """Switches inside the block of ``server`` meet this fault (``sglang_pat.checks.faults``)."""
    line = faults.get_hold_path(server.fault_file)
    os.mkfifo(line)
    server.held = os.open(line, os.O_RDONLY | os.O_NONBLOCK)
    server.fault_file.write_text(spec)
    try:
        yield
    finally:
        server.fault_file.unlink(missing_ok=True)
        os.close(server.held)
        line.unlink()


async def wait_until_held(server: Server) -> None:
    """Wait until a rank is held by a ``hold`` fault: so it stays until the block of :func:`fault` is left."""
    loop, held = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(server.held, held.set)
    await held.wait()
    loop.remove_reader(server.held)


@pytest.fixture(scope="session")
def servers(tmp_path_factory, prefork):
    pool = Servers(tmp_path_factory.mktemp("faults"), prefork)
    yield pool
    pool.stop()


def make_model(arch: str, name: str = "", **options: Any) -> Path:
    """Folder of a random model, of two layers: nearly all that an engine test takes is its layers."""
    return models.make_random(arch, MODELS / (name or arch), **{"layers": 2} | options)


@pytest.fixture(scope="session")
def llama() -> Path:
    """Two KV heads: one for each of two ranks, copied at tp 4.  503 tokens: padded at tp 2 and 4."""
    return make_model("llama", "llama-kv2", kv_heads=2)


@pytest.fixture(scope="session")
def stock(servers, llama) -> stock_answers.Stock:
    """What a stock server of ``llama`` answers to the requests of the test files that are compared with it."""

    return stock_answers.ask(lambda: servers.stock(llama))


@pytest.fixture(scope="session")
def flat() -> Path:
    """A model whose best token has a few percent, and no logprob is near 0, where it says nothing to 1e-5 of itself."""
    return make_model("llama", "llama-flat", kv_heads=2, logit_std=1.0)


@pytest.fixture(scope="session")
def marker() -> Callable[[int], Path]:
    """Folder of the marker model for a token."""
    return lambda token: make_marker_model(MODELS / f"marker{token}", token)


@pytest.fixture
def two(servers, marker) -> weight_updates.Setup:
    """Two ranks with a marker model."""
    return weight_updates.Setup(servers, marker, 2)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return models.make_smollm2(MODELS / "smollm2")


SCHEDULERS = {"plain": (), "overlap": ("--pat-cpu-overlap",)}
"""SGLang's two event loops; the second is CUDA's default."""


@pytest.fixture(scope="session")
def census_folders(tmp_path_factory) -> dict[str, Path]:
    """Where the ranks of :func:`checked_with` write what SGLang keeps in them."""
    return {kind: tmp_path_factory.mktemp(f"census-{kind}") for kind in SCHEDULERS}


@pytest.fixture
def checked_with(servers, llama, census_folders) -> Callable[[str], Server]:
    """Four ranks with one of :data:`SCHEDULERS`, so that some are followers before a merge; flags whose state every
    rank counts by itself."""
    flags = (
        "--scheduler-recv-interval 3 --max-running-requests 4 --enable-priority-scheduling "
        "--schedule-low-priority-values-first --priority-scheduling-preemption-threshold 4 --default-priority-value 2"
    ).split()

    def server(kind: str) -> Server:
        environment = {"SGLANG_PAT_CENSUS": str(census_folders[kind])}
        return servers.adaptive(llama, 4, *flags, *SCHEDULERS[kind], env=environment)

    return server


@pytest.fixture(params=[long("plain"), "overlap"])
def checked(request, checked_with) -> Server:
    return checked_with(request.param)


@pytest.fixture(scope="session")
def deployment(llama, prefork) -> Fingerprint:
    """The fingerprint of ``llama`` on two ranks."""
    return fingerprint(llama, prefork)


@pytest.fixture
def server(servers, llama) -> Server:
    """Two ranks."""
    return servers.adaptive(llama)


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with open_session() as opened:
        yield opened
