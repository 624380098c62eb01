"""The engine as the profiler uses it (:class:`Rig`): batches of exact shapes, the trace of their steps, switches."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from profiler.grid import Limits
from profiler.windows import Step
from sglang_pat.layout import ParallelLayout

POLL_SECONDS = 0.005
FLUSH_SECONDS = 60.0
"""Longest wait for an engine whose requests are all answered to empty its cache."""


class NoSwitch(RuntimeError):
    """The engine did not switch: aborted, or not now."""


class Rig:
    """One adaptive engine with policy ``manual``.

    Attributes:
        engine: :class:`~sglang_pat.server.engine.Engine`.
        temperature: temperature of the sampling; 0 is greedy.
        layouts: lowest degree first.
        tp: degree in force.
    """

    def __init__(self, engine: Any, temperature: float) -> None:
        self.engine = engine
        self.temperature = temperature
        self._random = random.Random(0)
        self._manager = engine.tokenizer_manager
        self.model = self._manager.model_config
        self.layouts: tuple[ParallelLayout, ...] = ()
        self.tp = 0

    async def connect(self) -> None:
        """Ask the engine for its layouts."""
        status = await self.engine.async_status()
        self.layouts = tuple(ParallelLayout(**layout) for layout in status["candidates"])
        self.tp = status["layout"]["tp"]

    def compute_limits(self, kv_tokens: int, max_running: int) -> Limits:
        """``kv_tokens``: of a replica of the base layout; another degree holds more where it splits KV heads."""
        heads, base = self.model.get_total_num_kv_heads(), self.layouts[0].tp
        local = {layout.tp: max(1, heads // layout.tp) for layout in self.layouts}
        # The engine's own reserve below both bounds, so that no prompt is refused or cut.
        longest = min(self.model.context_len, kv_tokens) - 16
        kv = {tp: kv_tokens * local[base] // local[tp] for tp in local}
        return Limits(layouts=self.layouts, kv_tokens=kv, max_running=max_running, max_length=longest)

    # -- requests -------------------------------------------------------------------------------------

    def sample_tokens(self, count: int) -> list[int]:
        """Random token ids for a prompt."""
        return self._random.choices(range(self.model.vocab_size), k=count)

    def send(self, prompts: Sequence[list[int]], answers: Sequence[int], **sampling: Any) -> list[asyncio.Task]:
        """Start a request for each prompt (token ids); each answer has exactly so many tokens."""
        return [
            asyncio.ensure_future(self._generate_one(prompt, answer, sampling))
            for prompt, answer in zip(prompts, answers, strict=True)
        ]

    async def _generate_one(self, prompt: list[int], answer: int, sampling: dict[str, Any]) -> dict[str, Any]:
        params = {"max_new_tokens": answer, "ignore_eos": True, "temperature": self.temperature} | sampling
        routed = self.engine.server_args.enable_return_routed_experts
        return await self.engine.async_generate(input_ids=prompt, sampling_params=params, return_routed_experts=routed)

    async def finish(self, tasks: Sequence[asyncio.Task]) -> list[dict[str, Any]]:
        """Wait for all answers, and until the engine is empty again."""
        answers = await asyncio.gather(*tasks)
        await self.wait_until_idle()
        return answers

    async def abort(self, tasks: Sequence[asyncio.Task]) -> None:
        """Give up what is still running."""
        self._manager.abort_request(abort_all=True)
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.wait_until_idle()

    async def wait_until_idle(self) -> None:
        """Wait until no request is known to the engine: then the next batch is spread evenly."""
        await self._manager.pat_wait_until_idle()

    async def flush(self) -> None:
        """Empty the radix cache; the engine is idle, or in the step that follows its last answer."""
        answer = await self._manager.flush_cache(timeout_s=FLUSH_SECONDS)
        if not answer.success:
            raise RuntimeError(f"the cache cannot be emptied: {answer.message or 'requests are alive'}")

    def inject(self, prompts: list[list[int]]) -> None:
        """Have what is sent next find ``prompts`` in every replica's radix cache, with whatever KV."""
        self.engine.inject_prefixes(prompts)

    async def read_trace(self) -> list[Step]:
        """Scheduler steps since the last call."""
        return await self.engine.async_trace()

    async def wait_until_decoding(self, tasks: Sequence[asyncio.Task], requests: int, steps: int = 2) -> None:
        """Wait until ``requests`` requests in all have decoded together for ``steps`` steps, in the layout in force.

        Forgets the trace.  Returns as well if all ``tasks`` are over.
        """
        last: dict[int, int] = {}
        seen: dict[int, int] = {}
        while not all(task.done() for task in tasks):
            for step in await self.read_trace():
                if step["tp"] != self.tp:
                    continue  # from before the last switch
                decoding = step["kind"] == "decode"
                last[step["rank"]] = step["requests"] if decoding else 0
                seen[step["rank"]] = seen.get(step["rank"], 0) + decoding
            if sum(last.values()) >= requests and all(count >= steps for count in seen.values()):
                return
            await asyncio.sleep(POLL_SECONDS)

    # -- layouts ----------------------------------------------------------------------------------------

    async def reconfigure(self, tp: int) -> dict[str, Any]:
        """Switch; returns the record, empty if nothing was to be done.  Raises NoSwitch."""
        if tp == self.tp:
            return {}
        try:
            record = await self.engine.async_reconfigure(tp)
        except RuntimeError as error:
            raise NoSwitch(f"no switch to tp{tp}: {error}") from error
        self.tp = tp
        return record
