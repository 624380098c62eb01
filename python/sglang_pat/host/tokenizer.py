"""The way of a request through the server, from its arrival to its last answer: in one class, from top to bottom.

SGLang's ``generate_request`` calls methods of :class:`RoutedTokenizerManager` in the order in which they stand here:

1. validated, before and after its text has become tokens (:mod:`.fixes.request_validation`);
2. remembered, until nobody waits for it and no rank has it (:mod:`.fixes.request_lifetime`);
3. held at a gate in a pause, beside an update of the weights, and before the calibration (:mod:`.fixes.pauses`);
4. sent to the coordinator, which chooses a replica for it (``coordinator/router.py``);
5. answered: outputs of all leaders come in order (``switch/order.py``).

Control requests (pauses, updates, flushes) and aborts are in the base classes, in the files of 2 and 3.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from typing import Any

from fastapi import Request
from sglang.srt.entrypoints.engine import init_tokenizer_manager
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_pat.dropped import Dropped, IsolatingDispatcher
from sglang_pat.host import adapter
from sglang_pat.host.assign import assign
from sglang_pat.host.fixes import request_validation
from sglang_pat.host.fixes.pauses import Gate, PausingTokenizerManager
from sglang_pat.host.shutdown import Shutdown, ShutdownSignalHandler, get_handlers
from sglang_pat.switch.order import AsyncOrderedReceiver

logger = logging.getLogger(__name__)

CLIENT_SECONDS = 4.0
"""Time between two looks whether the client of a request at the gate is still there; as SGLang's for one that runs."""

_held: list[RoutedTokenizerManager] = []
"""Managers kept to the end of the process, as SGLang's ``Engine`` keeps its own: as garbage, which a start that failed
leaves, the ZMQ context of one would wait for its sockets for ever."""


class RoutedTokenizerManager(PausingTokenizerManager):
    """SGLang's ``TokenizerManager`` in front of the coordinator.

    Attributes:
        pat_weight_updates: number of weight updates so far.
        pat_dropped: what could not be read or handled.
    """

    pat_weight_updates = 0
    _pat_calibrates = False
    """Whether requests other than made-up ones wait for the calibration."""

    def __init__(self, server_args: Any, port_args: Any) -> None:
        _held.append(self)
        super().__init__(server_args, port_args)
        dispatcher = IsolatingDispatcher(self._result_dispatcher, self.pat_dropped)
        assign(self, _result_dispatcher=dispatcher, signal_handler_class=ShutdownSignalHandler)

    def init_ipc_channels(self, port_args: Any) -> None:
        super().init_ipc_channels(port_args)
        self.pat_dropped = Dropped(self.server_args.enable_metrics)
        assign(self, recv_from_detokenizer=AsyncOrderedReceiver(self.recv_from_detokenizer, self.pat_dropped))

    def pat_init_states(self) -> None:
        super().pat_init_states()
        gate = Gate(self._pat_wait_at_gate, self._pat_at_gate.check)
        assign(self, is_pause_cond=gate, model_update_lock=gate)

    @classmethod
    def pat_make(cls, server_args: Any, port_args: Any) -> Any:
        """Do what SGLang's ``init_tokenizer_manager`` does, with this class."""
        return init_tokenizer_manager(server_args, port_args, cls)

    # -- the path of a request --------------------------------------------------------------------

    async def pat_generate(self, **fields: Any) -> dict[str, Any]:
        """The first answer to a request of this process with these fields of SGLang's ``GenerateReqInput``."""
        return await anext(self.generate_request(GenerateReqInput(**fields), None))

    async def pat_generate_unlogged(self, **fields: Any) -> None:
        """Generate for a measurement: nobody sees the answer, and the request does not wait for the calibration."""
        obj = GenerateReqInput(**fields)
        obj.pat_made_up = True
        # Not what a framework has put around it.
        async with aclosing(RoutedTokenizerManager.generate_request(self, obj)) as answers:
            async for _ in answers:
                pass

    async def generate_request(self, obj: Any, request: Request | None = None) -> AsyncIterator[Any]:
        """Generate as SGLang does, once ``obj`` has been checked; answers say how often weights had been updated.

        At its end nothing of ``obj`` goes on.

        Raises:
            ValueError: the request is not one that the engine takes; no rank has seen it.
        """
        try:
            route = None if request is None else request_validation.find_route(request)
            request_validation.check_request(obj, route)
            request_validation.drop_unknown_labels(obj, self.server_args)
            if self.pat_should_block_probe(obj):
                await self.pat_ask_ranks()
                return
            self.pat_begin_call(obj)
            try:
                async with aclosing(super().generate_request(obj, request)) as answers:
                    async for answer in answers:
                        for one in answer if isinstance(answer, list) else [answer]:
                            one["meta_info"]["weight_updates"] = self.pat_weight_updates
                        yield answer
            finally:
                self.pat_end_call(obj)
        except (TypeError, AttributeError, LookupError, ArithmeticError, RecursionError, AssertionError) as error:
            # What SGLang says of values that it did not expect, while it takes a request apart.
            if getattr(obj, "pat_sent", False):
                raise
            logger.debug("malformed request", exc_info=True)
            raise ValueError(f"the request is malformed: {type(error).__name__}: {error}"[:300]) from None

    def _init_req_state(self, obj: Any, request: Any = None) -> None:
        """Have SGLang make a state of each part of ``obj``, which is remembered from here on."""
        self._pat_newest = obj, request
        with self.pat_register_parts(obj):
            super()._init_req_state(obj, request)

    async def _pat_wait_at_gate(self) -> None:
        """Let the newest call wait at the gate, in place of SGLang's ``is_pause_cond``.

        Nobody has done anything since its parts began.

        Raises:
            ValueError: its client has left meanwhile.
        """
        obj, request = self._pat_newest
        self.pat_drop_spare(obj)
        number, made_up = obj.pat_number, hasattr(obj, "pat_made_up")
        states = [*self._pat_parts[number].values()]

        def passes() -> bool:
            shut = self._pat_is_gate_closed()
            if not shut:  # no sooner: the requests that it makes up would wait here, too
                self._pat_calibrate()
                shut = self._pat_calibrates and not made_up
            return not shut or all(state.finished for state in states)

        while not passes():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._pat_at_gate.wait_until(passes, number), CLIENT_SECONDS)
            if request is not None and not obj.background and await request.is_disconnected():
                raise ValueError("the client has left while its request waited")
        self._pat_inside.add(number)
        for state in states:
            state.pat_inside = True

    def _create_tokenized_object(self, *args: Any, **kwargs: Any) -> Any:
        """Make SGLang's message of the tokens, and check it."""
        tokenized = super()._create_tokenized_object(*args, **kwargs)
        routed = self.server_args.enable_return_routed_experts
        request_validation.check_tokenized(tokenized, self.model_config.vocab_size, self.tokenizer, routed)
        return tokenized

    def _send_one_request(self, tokenized_obj: Any) -> Any:
        """Send a request to the coordinator, unless it was aborted before; returns what SGLang's method does."""
        self._pat_begin_log()
        if not self.pat_may_send(tokenized_obj):
            return adapter.tokenizer.send_nothing()
        return super()._send_one_request(tokenized_obj)

    def _send_batch_request(self, tokenized_objs: Any) -> Any:
        self._pat_begin_log()
        going = [one for one in tokenized_objs if self.pat_may_send(one)]
        return super()._send_batch_request(going) if going else adapter.tokenizer.send_nothing()

    async def _handle_batch_output(self, recv_obj: Any) -> None:
        """Handle outputs from the detokenizer, and note which requests have ended."""
        await super()._handle_batch_output(recv_obj)
        self.pat_record_request_end()

    # -- what a subclass does with the first request ------------------------------------------------

    def _pat_calibrate(self) -> None:
        """Called when a request comes to the open gate; requests wait there while ``_pat_calibrates``."""

    def _pat_begin_log(self) -> None:
        """Called when a request is about to be sent: requests count from here on."""

    def pat_get_weight_version(self) -> str:
        """The version that clients have given to the weights in force."""
        return adapter.tokenizer.get_weight_version(self)

    # -- the end ----------------------------------------------------------------------------------

    def auto_create_handle_loop(self) -> None:
        if self.event_loop is None:
            before = get_handlers()
            super().auto_create_handle_loop()
            Shutdown(self, before)

    async def sigterm_watchdog(self) -> None:
        """Do nothing: SGLang would wait for all requests and kill this process; :class:`Shutdown` acts instead."""
