"""The coordinator's process (:func:`run_coordinator`): sockets around ``sglang_pat.coordinator.router.Coordinator``.

It stands where SGLang's data-parallel controller stands, and blocks on its sockets instead of polling.
"""

from __future__ import annotations

import faulthandler
import logging
import pickle
import time
import zlib
from array import array
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import setproctitle
import zmq

from sglang_pat.cpu import shim

shim.ensure()

from sglang_pat import messages  # noqa: E402
from sglang_pat.config import AdaptiveConfig  # noqa: E402
from sglang_pat.coordinator.decision_log import EventLog  # noqa: E402
from sglang_pat.coordinator.decisions import CALIBRATION  # noqa: E402
from sglang_pat.coordinator.replicas import Generation  # noqa: E402
from sglang_pat.coordinator.router import Control, Coordinator  # noqa: E402
from sglang_pat.dropped import Dropped  # noqa: E402
from sglang_pat.errors import format_one_line  # noqa: E402
from sglang_pat.figures import Figures, enable_job_log, job_log  # noqa: E402
from sglang_pat.host import adapter, controls  # noqa: E402
from sglang_pat.host.arguments import AdaptiveServerArgs  # noqa: E402
from sglang_pat.host.child import open_socket, set_up_child  # noqa: E402
from sglang_pat.launch.processes import end_engine  # noqa: E402
from sglang_pat.messages import count_prefix_tokens, get_length_limit, take_round_name  # noqa: E402
from sglang_pat.metrics import SwitchMetrics  # noqa: E402
from sglang_pat.policies.lending import LendingPolicy, make_lending_policy  # noqa: E402
from sglang_pat.policies.prompts import LONG_PROMPT  # noqa: E402
from sglang_pat.policies.registry import make_policy  # noqa: E402
from sglang_pat.policies.snapshot import Decision, Policy, Snapshot  # noqa: E402
from sglang_pat.predict.cost import SwitchCosts, build_predictors  # noqa: E402
from sglang_pat.predict.predictor import Predictor  # noqa: E402
from sglang_pat.predict.profile import Profile, describe_thinness  # noqa: E402

logger = logging.getLogger(__name__)

TICK_MILLISECONDS = 100
"""Longest the coordinator sleeps; policies that wait for something look again this often."""


class Sockets:
    """The coordinator's sockets, and its outbox."""

    def __init__(
        self, port_args: Any, leader_addresses: list[str], channel_address: str, metrics, log: EventLog | None
    ) -> None:
        context = zmq.Context(2)
        self.from_server = open_socket(context, zmq.PULL, port_args.scheduler_input_ipc_name, False)
        self.from_ranks = open_socket(context, zmq.PULL, channel_address, True)
        self.rpc = open_socket(context, zmq.DEALER, port_args.rpc_ipc_name, False)
        self._server = open_socket(context, zmq.PUSH, port_args.tokenizer_ipc_name, False)
        self._leaders = [open_socket(context, zmq.PUSH, address, True) for address in leader_addresses]
        self._metrics = metrics
        self._log = log

    def send_to_leader(self, rank: int, obj: Any) -> None:
        self._leaders[rank].send_pyobj(obj)

    def send_to_server(self, obj: Any) -> None:
        (self.rpc if controls.is_rpc_reply(obj) else self._server).send_pyobj(obj)

    def start_counting_requests(self) -> None:
        if self._log:
            self._log.write("counting")

    def log_decision(self, snapshot: Snapshot, decision: Decision) -> None:
        if self._log:
            self._log.log_decision(snapshot, decision)
        if self._metrics:
            self._metrics.set_factors(snapshot.factors)

    def log_response(self, response: messages.Finished) -> None:
        if self._log:
            fields = dict(length=response.length, family=response.family, since=response.since)
            self._log.write("length", finished=not response.cut, **fields)

    def record_switch(self, record: messages.SwitchRecord) -> None:
        what = "aborted" if record.error else "done"
        logger.info(
            "switch %d tp%d -> tp%d %s: pause %.1f ms, %d requests, %d KV tokens, %s%s%s",
            record.epoch, record.from_tp, record.to_tp, what, record.pause_seconds * 1e3, record.requests,
            record.tokens, record.reason, f", {len(record.lent)} ranks lent" if record.lent else "",
            f" ({record.error})" if record.error else "",
        )  # fmt: skip
        if self._metrics and record.reason != CALIBRATION:
            self._metrics.observe(record)

    def record_steps(self, counts: messages.StepCounts) -> None:
        if self._metrics:
            self._metrics.count_steps(counts)

    def record_training_step(self, step: Figures) -> None:
        job_log.info("step: %s", step.format_line())
        if self._log:
            self._log.write("step", **asdict(step))


def serve(coordinator: Coordinator, sockets: Sockets, dropped: Dropped) -> None:
    """Run forever.  Events are handled in the order of arrival on each socket; what cannot be read is dropped."""
    poller = zmq.Poller()
    for socket in (sockets.from_server, sockets.from_ranks, sockets.rpc):
        poller.register(socket, zmq.POLLIN)
    # Unix time for people, but never stepping back.
    offset = time.time() - time.monotonic()
    while True:
        ready = dict(poller.poll(TICK_MILLISECONDS))
        now = time.monotonic() + offset
        if sockets.from_ranks in ready:
            _drain_ranks(coordinator, sockets.from_ranks, now, dropped)
        for socket in (sockets.from_server, sockets.rpc):
            if socket in ready:
                _drain_server(coordinator, socket, now, dropped)
        coordinator.handle_timer(now)


def _drain_ranks(coordinator: Coordinator, socket: zmq.Socket, now: float, dropped: Dropped) -> None:
    while socket.poll(0):
        frames = socket.recv_multipart()
        try:
            rank, message = _decode_rank_message(frames, coordinator.config.num_ranks)
        except Exception as error:
            kind = messages.guess_kind(frames[-1])
            if kind in messages.PROTOCOL:
                raise
            dropped.note(kind, error)
            continue
        if isinstance(message, messages.FromRank):
            coordinator.handle_rank_message(message, now)
        else:
            coordinator.reply(rank, message, now)


def _decode_rank_message(frames: list[bytes], num_ranks: int) -> tuple[int, Any]:
    """The sender of a message and the message: one of our messages, or an object of SGLang's."""
    kind, sender, payload = frames
    rank = int(sender)
    message = pickle.loads(payload) if kind == messages.SGLANG else messages.decode_from_rank(payload)
    if not 0 <= rank < num_ranks or (kind != messages.SGLANG and message.rank != rank):
        raise ValueError(f"from rank {rank} of {num_ranks}, which is not its sender")
    return rank, message


FROM_SERVER: dict[type, Callable[[Coordinator, Any, float], None]] = {
    messages.StatusQuery: lambda coordinator, query, now: coordinator.handle_status_query(query, now),
    messages.Reconfigure: Coordinator.reconfigure,
    messages.LendRanks: Coordinator.lend_ranks,
    messages.LendingQuery: Coordinator.decide_lending,
    messages.BeginRound: Coordinator.handle_round,
    messages.EndRound: Coordinator.handle_round,
    messages.CalibrationTurn: Coordinator.calibrate,
    messages.TraceQuery: Coordinator.handle_trace_query,
    messages.ScheduleQuery: lambda coordinator, query, now: coordinator.handle_schedule_query(query),
    messages.SetSchedule: Coordinator.receive,
}
"""Messages of ours that the server sends to the coordinator itself."""


def _drain_server(coordinator: Coordinator, socket: zmq.Socket, now: float, dropped: Dropped) -> None:
    while socket.poll(0):
        try:
            obj = socket.recv_pyobj()
            handle = FROM_SERVER.get(type(obj))
            events = () if handle else classify(obj)
        except Exception as error:
            dropped.note("from the server", error)
            continue
        if handle:
            handle(coordinator, obj, now)
        for event in events:
            coordinator.receive(event, now)


def classify(obj: Any) -> list[Generation | Control]:
    """What the coordinator makes of an object from the TokenizerManager.

    Batches are taken apart, so that their requests spread over the replicas.  Anything not listed
    goes to all leaders and is not answered (aborts, pause, continue, ...).
    """
    if (generations := controls.list_generations(obj)) is not None:
        return [_parse_generation(one) for one in generations]
    if adapter.controls.is_for_controller(obj):
        return []
    controls.clear_sender(obj)
    reply, options = controls.CONTROLS.get(type(obj), (None, {}))
    answers = dict(
        reply=reply.__name__ if reply else None,
        refusal=lambda reason: controls.make_error_reply(obj, RuntimeError(reason)),
    )
    return [Control(obj=obj, **answers, **options, **controls.find_effects(obj))]


def _parse_generation(obj: Any) -> Generation:
    tokens, counts = len(obj.input_ids or ()), not controls.is_probe(obj.rid)
    if not obj.sampling_params:
        return Generation(obj=obj, tokens=tokens, counts=counts)
    name = take_round_name(obj.sampling_params)
    limit, generated = get_length_limit(obj.sampling_params), min(count_prefix_tokens(obj.sampling_params), tokens)
    prompt = tokens - generated
    # The same number as in load reports (``rank.load_reports``).
    family = zlib.crc32(array("I", obj.input_ids[:prompt])) if prompt >= LONG_PROMPT else None
    bounds = {} if limit is None else {"limit": limit}
    return Generation(obj=obj, tokens=tokens, generated=generated, family=family, counts=counts, round=name, **bounds)


def load_policies(
    config: AdaptiveConfig, profile: Profile | None
) -> tuple[Policy, Predictor | None, LendingPolicy | None, SwitchCosts | None]:
    """The policy of ``config``, the predictor of the profile, who says by it when ranks are lent, and what switches
    cost."""
    predictor = costs = lending = None
    if profile is not None:
        predictor, costs = build_predictors(profile)
        if thin := describe_thinness(profile):
            logger.warning("%s is %s: a larger --budget of profiler.sweep adds more", config.profile, thin)
        if config.predicts:
            lending = make_lending_policy(predictor, costs, config.num_ranks, config.list_degrees(), config.max_running)
    policy = make_policy(
        config.policy,
        switch_at=config.switch_at,
        predictor=predictor,
        costs=costs,
        max_running=config.max_running,
    )
    return policy, predictor, lending, costs


def run_coordinator(
    server_args: AdaptiveServerArgs,
    port_args: Any,
    leader_addresses: list[str],
    channel_address: str,
    parent_pid: int,
    pipe_writer,
) -> None:
    """The coordinator's process.  An exception ends the engine, as a rank's does."""
    setproctitle.setproctitle("sglang_pat::coordinator")
    faulthandler.enable()
    set_up_child(server_args, "coordinator")
    config, profile = server_args.spec.config, server_args.spec.profile
    if server_args.pat_in_a_job:
        enable_job_log()
    try:
        metrics = SwitchMetrics(config) if server_args.enable_metrics else None
        log = EventLog(config.log) if config.log else None
        sockets = Sockets(port_args, leader_addresses, channel_address, metrics, log)
        coordinator = Coordinator(config, sockets, *load_policies(config, profile))
        if log:
            settings = dict(switch_at=config.switch_at, profile=config.profile, max_running=config.max_running)
            log.write("start", policy=config.policy, **settings)
        pipe_writer.send({"status": "ready"})
        pipe_writer.close()
        serve(coordinator, sockets, Dropped(server_args.enable_metrics))
    except Exception as error:
        logger.exception("coordinator failed")
        end_engine(parent_pid, pipe_writer, f"the coordinator failed: {type(error).__name__}: {format_one_line(error)}")
