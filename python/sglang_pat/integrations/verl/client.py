"""Clients of verl's: their requests outlive the engine that has them (:class:`SurvivingClient`), and their responses
say of all their tokens who generated them: in parts, and in several turns."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextvars import ContextVar
from itertools import accumulate
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

from ray.actor import ActorHandle
from ray.exceptions import RayActorError
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from sglang_pat.integrations.verl.fields import DEGREES, MOVES, STEPS, STOPS, Turns, join_spans
from sglang_pat.rollout.requests import FIRST_LIVES, LIVES, leave_room

logger = logging.getLogger(__name__)

_parts: ContextVar[list[TokenOutput]] = ContextVar("parts")
"""Outputs of the requests for a response that verl's client asks for in parts: it keeps only the tokens of all."""

_mourned: set[str] = set()
"""Names of the engines of whose death it was told in this process's log."""

_RUNS = (DEGREES, STEPS)

_sessions: WeakValueDictionary[tuple[str, str], Turns] = WeakValueDictionary()
"""Fields by request, the same one in all turns of a response, and by name; for as long as they are in use."""


class _EngineDied(Exception):
    """The engine ``name`` has died; ``sent``: the parts of the response that it had sent, as
    :meth:`~.replica.AdaptiveServer.generate_parts` yields them."""

    def __init__(self, name: str, sent: Sequence[TokenOutput]) -> None:
        super().__init__()
        self.name, self.had, self.had_begun = name, bool(sent), len(sent) > 1
        self.output = _concatenate(sent)
        if sent:  # the last one's fields are about all tokens
            self.output.extra_fields = sent[-1].extra_fields


class _Engine:
    """An engine as verl's client calls it: ``await engine.generate.remote(…)``.  A response comes in parts, which are
    here when the engine dies."""

    def __init__(self, name: str, actor: ActorHandle) -> None:
        self._name, self._actor = name, actor
        self.generate = SimpleNamespace(remote=self._generate)

    async def _generate(self, **request: Any) -> TokenOutput:
        parts: list[TokenOutput] = []
        try:
            async for reference in self._actor.generate_parts.options(num_returns="streaming").remote(**request):
                parts.append(await reference)
        except RayActorError:
            if not parts or parts[-1].stop_reason is None:  # else the whole answer is here
                raise _EngineDied(self._name, parts) from None
        return parts[-1]


class SurvivingClient(LLMServerClient):
    """verl's client, whose requests go on elsewhere, from the tokens that are known, when their engine dies."""

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        name, actor = await super()._acquire_server(request_id, **extra)
        return name, _Engine(name, actor) if hasattr(actor, "generate_parts") else actor

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **named: Any
    ) -> TokenOutput:
        """Generate as verl's client.

        Raises:
            RuntimeError: engine after engine dies with this request, or none is left; one line.
        """
        parts: list[TokenOutput] = []
        died: list[str] = []
        holders: list[str] = []
        at_once = 0
        while True:
            tokens = [token for part in parts for token in part.token_ids]
            params = self._leave_room(sampling_params, len(prompt_ids), len(tokens))
            try:
                output = await super().generate(
                    request_id, prompt_ids=[*prompt_ids, *tokens], sampling_params=params, **named
                )
                output = _join(parts, output) if parts else output
                _parts.get([]).append(output)
                return output
            except _EngineDied as death:
                died.append(death.name)
                if death.had:  # else it was dead before
                    parts.append(death.output)
                    holders.append(death.name)
                    at_once += not death.had_begun
            except RuntimeError as error:
                if not died or "No available servers" not in str(error):
                    raise
                raise RuntimeError(f"no engine is left: {' and '.join(died)} died, and all others before") from None
            await self._load_balancer.remove_servers.remote(died[-1:])
            if len(holders) == LIVES or at_once == FIRST_LIVES:
                raise RuntimeError(
                    f"engines {' and '.join(holders)} died while they had request {request_id}, {at_once} of them "
                    f"before its first token, with a prompt of {len(prompt_ids)} tokens: it is not tried on another "
                    "one; their logs say why they died"
                )
            if died[-1] not in _mourned:
                _mourned.add(died[-1])
                logger.warning("engine %s has died: its requests go on elsewhere, from their tokens", died[-1])

    def _leave_room(self, sampling_params: dict[str, Any], prompt: int, count: int) -> dict[str, Any]:
        """Sampling parameters of what comes after ``count`` tokens; with none, those given: verl's server has its own
        limit, which depends on the prompt."""
        params = dict(sampling_params)
        if not count:
            return params
        rollout = self.config.actor_rollout_ref.rollout
        limit = min(rollout.response_length, rollout.prompt_length + rollout.response_length - prompt)
        for name in ("max_tokens", "max_new_tokens"):
            limit = params.pop(name, limit)
        return leave_room(params | {"max_new_tokens": limit}, count)


def _join(parts: Sequence[TokenOutput], last: TokenOutput) -> TokenOutput:
    """A response whose first parts are of engines that died."""
    every = [*parts, last]
    joined, whole = last.model_copy(), _concatenate(every)
    joined.token_ids = whole.token_ids
    if last.log_probs is not None:
        joined.log_probs = whole.log_probs
    joined.extra_fields = (
        last.extra_fields | _join_runs(every) | {MOVES: list(accumulate(len(part.token_ids) for part in parts))}
    )
    return joined


def _concatenate(parts: Sequence[TokenOutput]) -> TokenOutput:
    """The tokens of all parts, and their log-probabilities."""
    return TokenOutput(
        token_ids=[token for part in parts for token in part.token_ids],
        log_probs=[logprob for part in parts for logprob in part.log_probs or ()],
    )


def _join_runs(parts: Sequence[TokenOutput]) -> dict[str, Any]:
    """The fields that are runs, of a response in parts, and verl's least step of its tokens.

    A part without them has no tokens, or is of another engine.
    """
    joined: dict[str, Any] = {
        name: join_spans((len(part.token_ids), part.extra_fields[name]) for part in parts if name in part.extra_fields)
        for name in _RUNS
    }
    if steps := [step for _, step in joined[STEPS] if step is not None]:
        joined["min_global_steps"] = min(steps)
    return joined


class AdaptiveClient(SurvivingClient):
    """verl's client: the extra fields of a response's first turn, which are those of the sample, grow by each turn."""

    async def generate(self, request_id: str, *, prompt_ids: list[int], **named: Any) -> TokenOutput:
        output = await super().generate(request_id, prompt_ids=prompt_ids, **named)
        for name in {*_RUNS, STOPS} & output.extra_fields.keys():
            turns, prompt = _sessions.get((request_id, name)), len(prompt_ids)
            if turns is None or prompt <= turns.prompt:  # another response
                turns = _sessions[request_id, name] = Turns(prompt)
            if name == STOPS:
                turns += output.extra_fields[STOPS]
            else:
                turns.add(prompt - turns.prompt, len(output.token_ids), output.extra_fields[name])
            output.extra_fields[name] = turns
        return output


class _JoiningClient(FullyAsyncLLMServerClient, SurvivingClient):
    """verl's client that goes on after an abort."""

    async def generate(self, *args: Any, **kwargs: Any) -> TokenOutput:
        parts: list[TokenOutput] = []
        _parts.set(parts)
        output = await super().generate(*args, **kwargs)
        output.extra_fields |= _join_runs(parts)
        begins = accumulate((len(part.token_ids) for part in parts), initial=0)
        moves = [
            begin + at for begin, part in zip(begins, parts, strict=False) for at in part.extra_fields.get(MOVES, ())
        ]
        if moves:
            output.extra_fields[MOVES] = moves
        output.extra_fields[STOPS] = [output.stop_reason]
        return output


class AdaptiveAsyncClient(AdaptiveClient, _JoiningClient):
    """A client that goes on after an abort, whose responses say it of all their parts and turns."""
