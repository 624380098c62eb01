"""One adaptive engine in a Ray actor of verl's: verl's SGLang replica and server, which launch ours."""

from __future__ import annotations

import asyncio
import os
from base64 import b64decode
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import numpy as np
import ray
from verl.workers.rollout.replica import RolloutMode, TokenOutput
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer, SGLangReplica

from sglang_pat.config import VARIABLE
from sglang_pat.figures import Figures, job_log
from sglang_pat.integrations import CALLS
from sglang_pat.integrations.balance import EngineReport
from sglang_pat.integrations.verl import newer_sglang, options
from sglang_pat.integrations.verl.fields import DEGREES, STEPS, STOPPED, STOPS
from sglang_pat.messages import BeginRound, EndRound
from sglang_pat.policies.lending import Move, Training
from sglang_pat.rollout.requests import find_whole_only
from sglang_pat.server.attach import attach
from stream_layers import STREAM_VARIABLE
from stream_layers.attach import attach as attach_layers

SWITCH_SECONDS = 0.05
"""Seconds until an engine that switches is asked again."""

PART_TOKENS = 512
"""Tokens after which a client is sent what it does not have yet: so many are lost at most if the engine dies."""
LOOK_TOKENS = 50
"""Tokens after which SGLang tells this process of a request's tokens, as it does of those that are not streamed."""

_meta: ContextVar[dict[str, Any]] = ContextVar("meta")
"""Meta information of the answer to a request of :meth:`AdaptiveServer.generate`."""
_parts: ContextVar[Callable[[TokenOutput], None]] = ContextVar("parts")
"""What takes the parts of a response."""


class AdaptiveServer(SGLangHttpServer):
    """The actor that holds the engine's main process."""

    _in_round = False
    """Whether a round was announced, or something was asked of the engine, since the last round ended."""
    _refuses = False
    """Whether requests that come now are for another engine: their senders ask the balancer again."""
    _stops = False
    """Whether nobody waits for a response of this round any more."""
    _routed = False
    """Whether samples say which experts their tokens were routed to."""

    async def launch_server(self, *args: Any, **kwargs: Any) -> None:
        attach(options.read_settings(self.config, self.replica_rank), options.WHERE)
        newer_sglang.list_argument_fields()
        await super().launch_server(*args, **kwargs)
        # verl (0.9.1) would ask for them itself, and then read them as another SGLang returned them.
        self._routed = self.config.enable_rollout_routing_replay
        self.config = replace(self.config, enable_rollout_routing_replay=False)
        manager = self.tokenizer_manager
        manager.generate_request = _keep_meta_info(manager.generate_request, self._routed)

    async def generate(self, *args: Any, **kwargs: Any) -> TokenOutput:
        """Generate as verl's server; the sample's extra fields say which degree, and which step's weights, generated
        which tokens."""
        if self._refuses:
            return TokenOutput(token_ids=[], log_probs=[], stop_reason="aborted", extra_fields={})
        if self._stops:
            nothing = {DEGREES: (), STEPS: (), STOPS: [STOPPED]}
            return TokenOutput(token_ids=[], log_probs=[], stop_reason=STOPPED, extra_fields=nothing)
        if not self._in_round:  # a trainer of verl's own announces none
            await self.announce_round(BeginRound())
        meta: dict[str, Any] = {}
        _meta.set(meta)
        output = await super().generate(*args, **kwargs)
        if self._routed and (rows := meta.get("routed_experts")) is not None:
            config = self.model_config.hf_config
            shape = -1, config.num_hidden_layers, config.num_experts_per_tok
            output.routed_experts = np.frombuffer(b64decode(rows), np.int32).reshape(shape)
        elif self._routed:
            # Aborted while it waited.  verl would give these tokens the experts of later ones, so they come anew.
            output.token_ids, output.log_probs = [], output.log_probs and []
            meta.pop(DEGREES, None)
        output.extra_fields[DEGREES] = meta.get(DEGREES, ())
        output.extra_fields[STEPS] = ((0, output.extra_fields["global_steps"]),)
        if self._stops and output.stop_reason == "abort":
            output.stop_reason = STOPPED
        output.extra_fields[STOPS] = [output.stop_reason]  # verl's agents drop it
        return output

    async def generate_parts(self, **request: Any) -> AsyncIterator[TokenOutput]:
        """First an empty part: this engine has the request.  Then the first tokens of the response, then the new ones
        each time that there are :data:`PART_TOKENS`, then the answer of :meth:`generate`, with all tokens.

        The parts of a response that could not go on elsewhere from its tokens are empty, too.
        """
        nothing = TokenOutput(token_ids=[])
        yield nothing
        queue: asyncio.Queue[TokenOutput | None] = asyncio.Queue()
        _parts.set(queue.put_nowait)
        goes_on = not self._routed and not find_whole_only(request["sampling_params"])
        answer = asyncio.ensure_future(self.generate(**request))
        answer.add_done_callback(lambda _: queue.put_nowait(None))
        while (part := await queue.get()) is not None:
            part.extra_fields[STEPS] = ((0, self.global_steps),)
            yield part if goes_on else nothing
        yield await answer

    async def live(self) -> None:
        """Return never: the call fails when the engine dies."""
        await asyncio.Event().wait()

    async def refuse_requests(self, refuse: bool) -> None:
        self._refuses = refuse

    async def stop_requests(self) -> None:
        """End all that run, and all that come until the next round begins, with :data:`~.fields.STOPPED`."""
        self._stops = True
        await self.tokenizer_manager.pat_end_running()

    async def announce_round(self, message: BeginRound | EndRound, always: bool = False) -> None:
        """Tell the engine that a round begins, or ends; one that never sleeps has none without ``always``."""
        if always or self.rollout_mode == RolloutMode.HYBRID:
            self._in_round = isinstance(message, BeginRound)
            self._stops = self._stops and not self._in_round
            self.tokenizer_manager.pat_send_round(message)

    async def sleep(self) -> None:
        """Sleep as verl's server.  verl has its batch by then: what still runs is of an agent that has given it up."""
        await self._end_running()
        await self.announce_round(EndRound())
        await super().sleep()

    async def release_kv_cache(self) -> None:
        await self._end_running()
        await super().release_kv_cache()

    async def _end_running(self) -> None:
        if self.config.free_cache_engine and (ended := await self.tokenizer_manager.pat_end_running()):
            job_log.warning("%d requests ran on while memory was to be released, and were aborted", ended)

    async def lend_ranks(self, stride: int) -> list[int]:
        """Lend ranks; returns those that are lent now, none with stride 1 or if the switch was aborted."""
        from sglang_pat.server.tokenizer import ReconfigureError

        while True:
            try:
                return (await self.tokenizer_manager.pat_lend_ranks(stride)).get("lent", [])
            except ReconfigureError as error:
                if error.code == 500 and stride > 1:
                    job_log.warning("no ranks are lent in this step: %s", error)
                    return []
                if error.code != 409:  # a switch is under way
                    raise
                await asyncio.sleep(SWITCH_SECONDS)

    async def decide_lending(self, training: Training) -> Move:
        """The engine's answer of ``Engine.decide_lending``."""
        decision = await self.tokenizer_manager.pat_decide_lending(training)
        if (move := Move(decision["move"])) != Move.WAIT:
            figures = move, f"{training.completion:.0%}", decision["why"], decision["gain"]
            job_log.info("lending ranks: %s, with %s of the batch complete: %s (gain %.2f s)", *figures)
        return move

    async def load(self) -> EngineReport:
        """Report for a balancer of requests."""
        manager = self.tokenizer_manager
        return EngineReport.from_status(await manager.pat_status(), manager.server_args.max_running_requests)

    async def get_totals(self) -> Figures:
        """Figures of what the engine did since its start."""
        return Figures.from_status(await self.tokenizer_manager.pat_status())


class PlainServer(SGLangHttpServer):
    """The actor of a reward model or a teacher: verl's own, also where the variable ``SGLANG_PAT`` is set.  It may
    stream layers from host memory."""

    async def launch_server(self, *args: Any, **kwargs: Any) -> None:
        os.environ.pop(VARIABLE, None)  # SGLang's plug-in would read it, in this process and in the engine's
        if (layers := options.read_stream_setting(self.config)) is not None:
            os.environ[STREAM_VARIABLE] = layers
            attach_layers()
        newer_sglang.list_argument_fields()
        await super().launch_server(*args, **kwargs)


def _keep_meta_info(generate_request: Any, routed: bool = False) -> Any:
    """Keep an answer's ``meta_info`` for the one who asked: verl drops it after it took what it knows.

    Parts of a response are passed on, if somebody takes them.  With ``routed`` ask for routed experts, too.

    verl's ``generate`` asks for one response.  A client over HTTP may ask for several: their answer is a list.
    """

    async def noted(obj: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        meta = _meta.get(None)
        if routed and meta is not None:
            obj.return_routed_experts = True
        take, sent = _parts.get(None), 0
        if take is not None:
            obj.stream, obj.sampling_params["stream_interval"] = True, LOOK_TOKENS
        async for answer in generate_request(obj, *args, **kwargs):
            if meta is not None:
                meta.update(answer["meta_info"])
            if take is None or answer["meta_info"]["finish_reason"] is not None:
                yield answer
            elif len(answer["output_ids"]) - sent >= (PART_TOKENS if sent else 1):
                logprobs = answer["meta_info"].get("output_token_logprobs")
                part = TokenOutput(
                    token_ids=answer["output_ids"][sent:],
                    log_probs=None if logprobs is None else [float(entry[0]) for entry in logprobs[sent:]],
                    extra_fields={DEGREES: answer["meta_info"].get(DEGREES, ())},  # of all its tokens
                )
                take(part)
                sent = len(answer["output_ids"])

    return noted


class AdaptiveReplica(SGLangReplica):
    """verl's handle of an engine on ``tensor_model_parallel_size`` GPUs of one node."""

    def __init__(self, replica_rank: int, config: Any, model_config: Any, gpus_per_node: int = 8, **named: Any) -> None:
        super().__init__(replica_rank, config, model_config, gpus_per_node, **named)
        options.check(self.config, gpus_per_node, self.model_config)
        self.server_class = ray.remote(AdaptiveServer)

    @property
    def max_concurrency(self) -> int:
        return max(super().max_concurrency, CALLS)

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Abort as verl's replica; with ``reject_request``, which verl ignores for SGLang, what comes later does not
        wait here either."""
        if reject_request:
            await self.servers[0].refuse_requests.remote(True)
        await super().abort_all_requests()

    async def resume_generation(self) -> None:
        await super().resume_generation()
        await self.servers[0].refuse_requests.remote(False)
