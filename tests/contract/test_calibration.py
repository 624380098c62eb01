"""The server's part of a calibration: what it sends, in which order, and that nothing stops the first request."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from sglang_pat.config import AdaptiveConfig
from sglang_pat.layout import ParallelLayout
from sglang_pat.predict.correction import TURNS, StepFactor
from sglang_pat.server import calibration
from sglang_pat.server.tokenizer import AdaptiveTokenizerManager

from .tokenizer_world import Manager as World
from .tokenizer_world import settle

CONFIG = AdaptiveConfig(base=ParallelLayout(1, 4), policy="survival", profile="-", calibrate=8)


class Manager:
    """Notes what it is asked for; ``fails``: the number of the switch that does."""

    def __init__(
        self, context_len: int = 16384, kv: int = 1 << 20, fails: int | None = None, cached: bool = True,
        device="cuda", profiled: tuple[int, int] = (256, 32768),
    ) -> None:  # fmt: skip
        self.context_len, self._kv, self._fails = context_len, kv, fails
        batch, context = profiled
        points = [SimpleNamespace(batch=1, context=64), SimpleNamespace(batch=batch, context=context)]
        spec = SimpleNamespace(config=CONFIG, profile=SimpleNamespace(decode=points))
        self.server_args = SimpleNamespace(spec=spec, disable_radix_cache=not cached, device=device)
        self.model_config = SimpleNamespace(vocab_size=500)
        self.did, self.made_up, self.injected = [], [], []
        self.busy, self.flushes = 0, True
        self.decodes: asyncio.Event | None = None
        """An event on a machine so slow that only an abort ends the request; None on any other."""

    def pat_send_calibration_turn(self, over: bool = False) -> None:
        self.did.append("over" if over else "turn")

    async def pat_reconfigure(self, tp: int) -> None:
        if self._fails == sum(isinstance(done, int) for done in self.did):
            raise RuntimeError("no memory")
        self.did.append(tp)

    async def pat_generate_unlogged(self, **fields) -> None:
        assert not self.busy, "the one before is not known to be over"
        self.made_up.append(SimpleNamespace(**fields))
        if self.decodes is not None:
            await self.decodes.wait()
            self.decodes.clear()
        self.busy = 2

    def abort_request(self, rid: str) -> None:
        assert rid == self.made_up[-1].rid and self.decodes is not None, "only where it is too slow"
        self.decodes.set()

    async def pat_status(self) -> dict:
        self.busy = max(self.busy - 1, 0)
        groups = [{"kv_total": self._kv}] * 4
        return {"requests": self.busy, "step_factors": dict.fromkeys((1, 2, 4), StepFactor()), "groups": groups}

    def pat_inject_prefixes(self, prompts: list[list[int]]) -> None:
        self.injected.append(prompts)

    pat_wait_until_idle = AdaptiveTokenizerManager.pat_wait_until_idle

    async def flush_cache(self, timeout_s: float) -> SimpleNamespace:
        assert not self.busy
        self.did.append("flush")
        return SimpleNamespace(success=self.flushes, message="")


def test_layouts_take_turns_there_and_back():
    manager = Manager()
    asyncio.run(calibration.calibrate(manager))
    assert manager.did == [*["turn", 1, 2, 4, "turn", 4, 2, 1] * 2, 1, "flush", "over"]
    sizes = [len(request.input_ids) for request in manager.made_up]
    assert sizes == [4 * each for each, _ in TURNS for _ in range(3)], "for each replica of the base layout"
    ids = [request.input_ids for request in manager.made_up]
    assert [{*map(len, prompts)} for prompts in ids] == [{context} for _, context in TURNS for _ in range(3)]
    assert manager.injected == ids, "they are not computed"
    assert all(len({*map(tuple, prompts)}) == len(prompts) for prompts in ids), "equal ones choose equal experts"
    assert max(map(max, ids[0])) < 500
    # The first token is prefill's, and the step after it does not count.
    assert manager.made_up[0].sampling_params["max_new_tokens"] == 8 + 2


def test_a_slow_machine_takes_fewer_turns(monkeypatch):
    monkeypatch.setattr(calibration, "ENOUGH_SECONDS", -1.0)
    manager = Manager()
    asyncio.run(calibration.calibrate(manager))
    assert manager.did == ["turn", 1, 2, 4, "turn", 4, 2, 1, 1, "flush", "over"]


async def test_a_layout_whose_steps_take_too_long_makes_fewer(monkeypatch):
    monkeypatch.setattr(calibration, "MOST_SECONDS", 0.0)
    manager = Manager()
    manager.decodes = asyncio.Event()
    await asyncio.wait_for(calibration.calibrate(manager), 30)
    assert manager.did == [*["turn", 1, 2, 4, "turn", 4, 2, 1] * 2, 1, "flush", "over"]


@pytest.mark.parametrize(
    "options, most",
    [
        (dict(context_len=40), 40 - 8 - 2),
        (dict(kv=1000), 1000 // 4 - 8 - 2),  # each replica has the prompts of all
        (dict(cached=False), 64),
        (dict(device="cpu"), 2048),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_prompts_are_shorter_where_there_is_no_room_or_they_are_computed(options, most):
    manager = Manager(**options)
    asyncio.run(calibration.calibrate(manager))
    assert max(len(prompt) for request in manager.made_up for prompt in request.input_ids) <= most
    if "kv" in options:
        assert all(len(one.input_ids) * (len(one.input_ids[0]) + 8 + 2) <= 1000 for one in manager.made_up)


def test_nothing_is_measured_beyond_what_was_profiled():
    manager = Manager(profiled=(8, 100))
    asyncio.run(calibration.calibrate(manager))
    assert {len(request.input_ids) for request in manager.made_up} == {4, 8}
    assert {len(prompt) for request in manager.made_up for prompt in request.input_ids} == {64, 100}


@pytest.mark.parametrize("switch", [0, 4])
def test_a_switch_that_fails_ends_it_and_is_logged(switch, caplog):
    manager = Manager(fails=switch)
    asyncio.run(calibration.calibrate(manager))
    assert manager.did[-2:] == ["flush", "over"], "nothing was computed of the prompts that are in the cache"
    assert "the profile is not calibrated: no memory" in caplog.text


def test_made_up_prompts_that_stay_in_the_cache_are_told(caplog):
    manager = Manager()
    manager.flushes = False
    asyncio.run(calibration.calibrate(manager))
    assert manager.did[-2:] == ["flush", "over"]
    assert "the cache still has made-up prompts" in caplog.text


async def test_first_requests_wait_for_it_and_it_does_not_wait_for_them(monkeypatch):
    """Three come at once: one leaves, one is aborted, and neither ever goes to a rank; its own request does."""
    manager, measured = World(monkeypatch), asyncio.Event()

    async def calibrate(manager) -> None:
        made_up = dict(rid="made up", text="x", sampling_params={})
        await asyncio.gather(manager.pat_generate_unlogged(**made_up), measured.wait())

    monkeypatch.setattr("sglang_pat.server.tokenizer.calibrate", calibrate)
    manager._pat_calibrates = True
    left, aborted, waits = (manager.ask(rid) for rid in ("left", "aborted", "waits"))
    await settle()
    assert manager.requests == ["made up"]
    left.cancel()
    manager.abort_request("aborted")
    assert (await aborted)[0]["meta_info"]["finish_reason"]["type"] == "abort"
    await manager.told("made up", "length")
    await settle()
    assert not waits.done() and manager.requests == ["made up"]
    measured.set()
    await settle()
    assert manager.requests == ["made up", "waits"]
    await manager.told("waits", "length")
    await waits


@pytest.mark.parametrize("shuts", ["memory", "pause"])
async def test_it_begins_when_the_gate_opens(monkeypatch, shuts):
    """A calibration at a shut gate would wait for its own requests there, until they are aborted as too slow."""
    manager, begun = World(monkeypatch), []

    async def calibrate(manager) -> None:
        begun.append(manager)

    monkeypatch.setattr("sglang_pat.server.tokenizer.calibrate", calibrate)
    manager._pat_calibrates = True
    if shuts == "memory":
        manager._pat_released = {"weights"}
    else:
        manager.is_pause = True
    waits = manager.ask("waits")
    await settle()
    assert not begun and not manager.requests
    manager.is_pause = False
    manager._pat_resume_memory({"weights"})
    await settle()
    assert begun == [manager] and manager.requests == ["waits"], "nobody else has to come"
    await manager.told("waits", "length")
    await waits
