"""README's command and no other flag: memory is planned, only loopback and private sockets, an end in order."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from sglang_pat.launch import processes as launched
from sglang_pat.launch.processes import wait_until_ended
from sglang_pat.memory.memory_plan import CPU_TOKENS
from sglang_pat.testing.server import Server

from .streams import body

PLAIN = ("--tp", "1", "--dp", "2", "--adaptive-tp")


@pytest.fixture(scope="module")
def place():
    """Where the servers of this module put their temporary files; short, for sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="pat") as made:
        yield Path(made)


@pytest.fixture
def start(servers, llama, place) -> Callable[..., Server]:
    return lambda **options: servers.get(llama, *PLAIN, max_total_tokens=None, env={"TMPDIR": str(place)}, **options)


@pytest.fixture
def server(start) -> Server:
    """Started as a user starts it."""
    return start(prefork=None)


def test_the_pool_is_planned(server):
    answer = server.post("/generate", {"text": "hello", "sampling_params": {"max_new_tokens": 4}})
    assert answer.status_code == 200
    assert server.get("/server_info").json()["max_total_num_tokens"] == CPU_TOKENS
    log = server.log_text()
    assert "memory plan: tp1×dp2, 2 ranks; the machine has" in log
    assert f"KV, {CPU_TOKENS:,} tokens" in log


def test_nobody_else_reaches_the_processes(server, place):
    (own,) = place.glob(launched.FOLDER_PREFIX + "*")
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    found = sockets(place)
    assert len(found) > 5 and all(own in path.parents for path in found)
    processes = [psutil.Process(server.process.pid), *server.list_children()]
    listening = [c.laddr.ip for p in processes for c in p.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert len(listening) > 1 and set(listening) == {"127.0.0.1"}


def test_nothing_in_shared_memory_has_a_name(server):
    """What has one stays there when its process is killed."""
    processes = [psutil.Process(server.process.pid), *server.list_children()]
    mapped = {m.path for p in processes for m in p.memory_maps() if "/dev/shm/" in m.path}
    named = {path for path in mapped if Path(path).exists()}
    assert not named


def sockets(place: Path) -> list[Path]:
    return [path for path in place.rglob("*") if stat.S_ISSOCK(path.lstat().st_mode)]


async def end_while_it_works(server, send) -> list:
    """Four requests decode, a switch is asked for, then ``send``; how each of the four ended.

    A reason why it finished, or the error that its client got.
    """

    async def one(session, decodes: asyncio.Event) -> str:
        async for chunk in server.stream(session, body(1, 4000)):
            decodes.set()
            if reason := chunk["meta_info"]["finish_reason"]:
                return reason["type"]
        raise ConnectionError("the stream ended without a reason")

    async with server.session() as session:
        started = [asyncio.Event() for _ in range(4)]
        work = [asyncio.ensure_future(one(session, decodes)) for decodes in started]
        await asyncio.gather(*(decodes.wait() for decodes in started))
        work.append(asyncio.ensure_future(server.reconfigure_async(session, 2)))
        send()
        ends = await asyncio.gather(*work, return_exceptions=True)
        await asyncio.to_thread(server.process.wait, 500)
        return ends[:4]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_order(start, place, number):
    """The signal goes to the process group, as a terminal and a service manager send it; the second one to a fork."""
    server = start(prefork=None) if number == signal.SIGTERM else start()
    children = server.list_children()
    ends = asyncio.run(end_while_it_works(server, lambda: os.killpg(server.process.pid, number)))
    assert all(end == "abort" or isinstance(end, Exception) for end in ends), ends
    assert "abort" in ends
    assert server.process.returncode == 128 + number, server.log_text()[-3000:]
    # SGLang's own warm-up may come to its last request when nobody listens any more.
    assert "Traceback" not in server.log_text().partition("post-warmup freeze_gc failed")[0]
    assert "leaked" not in server.log_text()
    assert not wait_until_ended(children, 120)
    assert not sockets(place) and not list(place.glob(launched.FOLDER_PREFIX + "*"))


def test_nothing_of_a_killed_server_goes_on(start):
    server = start()
    children = server.list_children()
    server.process.kill()
    assert not wait_until_ended(children, 500)
