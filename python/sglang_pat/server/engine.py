"""SGLang's ``Engine`` on N ranks that change their layout: what our processes run, and what users ask of it."""

from __future__ import annotations

import asyncio
import multiprocessing as mp
from collections.abc import Callable
from typing import Any

from sglang_pat.cpu import shim
from sglang_pat.launch import processes

shim.ensure(children=True)
if mp.parent_process() is None:  # not in a child that only looks something up here
    processes.warm_up_fork_server()

from sglang_pat import files  # noqa: E402
from sglang_pat.coordinator.process import run_coordinator  # noqa: E402
from sglang_pat.host.arguments import make_fingerprint  # noqa: E402
from sglang_pat.host.engine import LaunchedEngine  # noqa: E402
from sglang_pat.host.process import run_detokenizer, run_rank  # noqa: E402
from sglang_pat.layout import ParallelLayout  # noqa: E402
from sglang_pat.messages import BeginRound, EndRound  # noqa: E402
from sglang_pat.policies.lending import Training  # noqa: E402
from sglang_pat.predict.profile import Fingerprint  # noqa: E402
from sglang_pat.rollout.loop import EngineLoop  # noqa: E402
from sglang_pat.server.rollout import EngineRollouts  # noqa: E402
from sglang_pat.server.tokenizer import AdaptiveTokenizerManager, ReconfigureError  # noqa: E402

__all__ = ["Engine", "ReconfigureError"]


class AdaptiveEngine(LaunchedEngine):
    """The engine that the HTTP server and :class:`Engine` launch."""

    init_tokenizer_manager_func = staticmethod(AdaptiveTokenizerManager.pat_make)
    programs = {"coordinator": run_coordinator, "rank": run_rank, "detokenizer": run_detokenizer}


class Engine(EngineRollouts, AdaptiveEngine):
    """SGLang's ``Engine``, offline API included, plus ``layout``, ``reconfigure``, ``status`` and ``rollout``.

    ``Engine(model_path=..., tp_size=1, dp_size=2, adaptive_tp=True, ...)``; without ``adaptive_tp`` use
    SGLang's own.

    Raises:
        ValueError: from the constructor, for what the adaptive engine does not support, or could not start; one
            line that says what was given and what to change.
    """

    def __init__(self, **kwargs: Any) -> None:
        if "server_args" not in kwargs and not kwargs.get("adaptive_tp"):
            raise ValueError("sglang_pat.Engine needs adaptive_tp=True; for a static layout use sglang.Engine")
        super().__init__(**kwargs)
        # SGLang keeps the arguments as given; show it the engine as it is: N ranks.
        self.server_args = self.tokenizer_manager.server_args
        if not self.loop.is_running():  # else it is the caller's; SGLang has just made this one, and not used it
            self.loop.close()
            self.loop = EngineLoop()
            asyncio.set_event_loop(self.loop)

    def shutdown(self) -> None:
        """Shut down as :meth:`LaunchedEngine.shutdown` does; a rollout that is under way ends with an error."""
        super().shutdown()
        if isinstance(getattr(self, "loop", None), EngineLoop):
            self.loop.end()

    def _await(self, coroutine: Any) -> Any:
        if self.loop.is_running() and not isinstance(self.loop, EngineLoop):
            return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()
        return self.loop.run_until_complete(coroutine)

    @property
    def layout(self) -> ParallelLayout:
        """The layout in force."""
        return ParallelLayout(**self.status()["layout"])

    def status(self) -> dict[str, Any]:
        """The answer of ``GET /pat/status``.  Loads are as last reported: a request may be in them after its answer."""
        return self._await(self.tokenizer_manager.pat_status())

    def reconfigure(self, tp: int, dry_run: bool = False) -> dict[str, Any]:
        """Switch to degree ``tp`` now; returns the switch record, times in seconds (empty if already there).

        With ``dry_run`` it only says what that would do
        (:func:`sglang_pat.coordinator.replicas.forecast_switch`).

        Raises:
            ReconfigureError: not a candidate, a switch under way, or aborted.
        """
        return self._await(self.tokenizer_manager.pat_reconfigure(tp, dry_run))

    def lend_ranks(self, stride: int = 2) -> dict[str, Any]:
        """Go on with the first of every ``stride`` ranks, and lend the others; returns the record of the switch (empty
        if it is so already), whose ``lent`` names them.

        Their requests go on at the rank before them.  The others still change their degree, up to N / ``stride``.
        They have no lease, as they would have over HTTP: the engine ends with this process.

        Raises:
            ReconfigureError: not with this stride (400), a switch is under way or memory is released (409), or aborted
                (500).
        """
        return self._await(self.tokenizer_manager.pat_lend_ranks(stride))

    def take_back_ranks(self) -> dict[str, Any]:
        """Go on with all ranks; returns the record of the switch (empty if none is lent).  Raises as
        :meth:`lend_ranks`."""
        return self._await(self.tokenizer_manager.pat_lend_ranks(1))

    def decide_lending(self, **fields: Any) -> dict[str, Any]:
        """Whether ranks should be lent now, or taken back; to be asked whenever a group is complete.

        Returns the fields of a :class:`~sglang_pat.policies.lending.LendingDecision`: ``move`` is ``lend``, ``wait``,
        ``never`` or ``take_back``; ``leave`` only if ``others`` are given.

        Args:
            fields: those of :class:`~sglang_pat.policies.lending.Training`.

        Raises:
            ValueError: a field that cannot be, one line with its name.
        """
        return self._await(self.async_decide_lending(**fields))

    def trace(self) -> list[dict[str, Any]]:
        """Steps of all replicas since the last call, oldest first (the last 16,384 of each rank).

        Each has ``rank`` (the replica's leader), ``tp``, ``kind`` (``decode`` or ``prefill``), ``at`` (when it ended,
        seconds of the machine's monotonic clock), ``seconds``, ``requests`` and ``tokens`` (context tokens of a
        decode step's batch, or tokens prefilled).
        """
        return self._await(self.tokenizer_manager.pat_get_trace())

    def inject_prefixes(self, prompts: list[list[int]]) -> None:
        """Make every replica believe that it has the KV of ``prompts`` (token ids), without computing it.

        For measurements only (PAT section 4.2): step times do not depend on what is in the KV, but the answers to
        such prompts mean nothing until ``flush_cache()``.  A switch forgets them.
        """
        self._run_in_loop(lambda: self.tokenizer_manager.pat_inject_prefixes(prompts))

    def begin_round(self, requests: int | None = None, **fields: Any) -> None:
        """A round of ``requests`` samples begins, for what is generated from now on; until :meth:`end_round`.

        Args:
            fields: others of :class:`~sglang_pat.messages.BeginRound`.

        Raises:
            ValueError: a field that cannot be, one line with its name.
        """
        begun = files.convert({"requests": requests, **fields}, BeginRound)
        self._run_in_loop(lambda: self.tokenizer_manager.pat_send_round(begun))

    def end_round(self, name: str = "default") -> None:
        """The round of this name is over; nothing happens if there is none."""
        self._run_in_loop(lambda: self.tokenizer_manager.pat_send_round(EndRound(name=name)))

    def _run_in_loop(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` in the engine's loop, whose sockets only its own thread may use."""

        async def told() -> None:
            tell()

        if asyncio._get_running_loop() is self.loop:
            tell()
        else:
            self._await(told())

    def get_fingerprint(self) -> Fingerprint:
        """Fingerprint of what a profile taken on this engine holds for."""
        info, args = self._scheduler_init_result.scheduler_infos[0], self.server_args
        return make_fingerprint(args, args.spec.config, info["max_total_num_tokens"], info["pat_max_running"])

    async def async_trace(self) -> list[dict[str, Any]]:
        return await self.tokenizer_manager.pat_get_trace()

    async def async_status(self) -> dict[str, Any]:
        return await self.tokenizer_manager.pat_status()

    async def async_lend_ranks(self, stride: int = 2) -> dict[str, Any]:
        return await self.tokenizer_manager.pat_lend_ranks(stride)

    async def async_take_back_ranks(self) -> dict[str, Any]:
        return await self.tokenizer_manager.pat_lend_ranks(1)

    async def async_decide_lending(self, **fields: Any) -> dict[str, Any]:
        return await self.tokenizer_manager.pat_decide_lending(files.convert(fields, Training))

    async def async_reconfigure(self, tp: int, dry_run: bool = False) -> dict[str, Any]:
        return await self.tokenizer_manager.pat_reconfigure(tp, dry_run)
