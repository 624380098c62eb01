"""SGLang's own TokenizerManager with ours over it, and nothing behind it: ranks are played; no test of its own."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import tokenizer_manager as sglang_manager
from sglang.srt.managers.io_struct import AbortReq, BatchTokenIDOutput, GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_pat.host import adapter
from sglang_pat.host.fixes import request_validation
from sglang_pat.server.tokenizer import AdaptiveTokenizerManager

LONGEST = 3
"""The most letters of a prompt that is taken."""
SETTINGS = dict.fromkeys(
    "incremental_streaming_output enable_lora enable_trace language_only enable_tokenizer_batch_encode "
    "enable_dp_attention enable_priority_scheduling speculative_algorithm".split()
)
PUBLISHED = dict(weight_version="7", skip_tokenizer_init=True, batch_notify_size=16, load_format="auto")
"""Arguments that SGLang 0.5.23 reads where they are published."""


class Transports:
    """What SGLang 0.5.23 has beside its sockets, for requests with images."""

    async def prepare_for_dispatch_async(self, inputs: Any) -> list[Any]:
        return []

    def prepare_for_dispatch(self, requests: Any) -> list[Any]:
        return []

    def cancel_for_dispatch(self, prepared: Any) -> None: ...


class Tokenized(SimpleNamespace):
    """A request as it goes to a rank."""

    def wrap_pickle_fields(self) -> None: ...


class Manager(AdaptiveTokenizerManager):
    """A manager whose tokenizer suspends once for each prompt.

    Attributes:
        sent: what went to the ranks, in that order.
    """

    def __init__(self, monkeypatch) -> None:
        monkeypatch.setattr(sglang_manager, "wrap_shm_features", lambda obj: obj)
        monkeypatch.setattr(request_validation, "check_request", lambda *_: None)
        self.server_args = SimpleNamespace(**SETTINGS, **PUBLISHED, dp_size=1, tokenizer_worker_num=1)
        if adapter.FOLDER != "v0_5_12":
            self._publish(monkeypatch)
        self.rid_to_state, self.event_loop, self.tokenizer = {}, asyncio.get_event_loop_policy(), None
        self.dump_requests_folder = self.crash_dump_folder = ""
        self.enable_metrics = self.enable_priority_scheduling = self.is_pause = self._pat_calibrates = False
        self.default_priority_value, self.pat_log_begins = None, False
        self.disaggregation_mode, self.is_generation = DisaggregationMode.NULL, True
        self.request_logger = MagicMock()
        self.request_metrics_exporter_manager = SimpleNamespace(exporter_enabled=lambda: False)
        self.sent: list[Any] = []
        self.send_to_scheduler = SimpleNamespace(send_pyobj=self._sends)
        self.pat_rounds = set()
        self.pat_weight_updates, self._pat_calibration = 0, None
        self.init_request_dispatcher()
        self.is_pause_cond = self.model_update_lock = None
        self.pat_init_states()

    def _publish(self, monkeypatch) -> None:
        from sglang.srt import runtime_context

        context = runtime_context.RuntimeContext(parallel=runtime_context.ParallelContext())
        monkeypatch.setattr(runtime_context, "_CONTEXT", context)
        monkeypatch.setattr(runtime_context, "_PARALLEL", context.parallel)
        context.override_server_args(**PUBLISHED).install()
        self.cuda_vmm_feature_transport = self.positional_embeds_transport = Transports()
        self.enable_lora = self.enable_trace = self.incremental_streaming_output = False
        self.mm_processor, self.tokenizer_ipc_name, self.encoder_dispatch_ready = None, None, {}
        self.elastic_worker_count, self.skip_tokenizer_init, self.model_path = 1, True, "m"

    def _sends(self, obj: Any, **_: Any) -> asyncio.Future:
        self.sent.append(obj)
        sent = asyncio.get_running_loop().create_future()
        sent.set_result(None)
        return sent

    async def _tokenize_one_request(self, obj) -> Any:
        await asyncio.sleep(0)
        if len(obj.text) > LONGEST:
            raise ValueError("too long")
        stats = self.rid_to_state[obj.rid].time_stats
        return Tokenized(
            rid=obj.rid, stream=obj.stream, sampling_params=SamplingParams(), time_stats=stats, mm_inputs=None
        )

    @property
    def requests(self) -> list[str]:
        """Ids of the requests that went to a rank."""
        return [one.rid for one in self.sent if isinstance(one, Tokenized)]

    @property
    def aborted(self) -> list[str]:
        return [one.rid for one in self.sent if isinstance(one, AbortReq)]

    def ask(
        self, rid: str | list[str], stream: bool = False, n: int = 1, text: Any = None, request: Any = None
    ) -> asyncio.Future:
        """Ask a request, or a batch of texts, which SGLang sends one by one; returns the answer."""
        text = text or ("x" if isinstance(rid, str) else ["x"] * len(rid))
        obj = GenerateReqInput(rid=rid, text=text, sampling_params={"n": n}, stream=stream)
        return asyncio.ensure_future(self._all(obj, request))

    async def _all(self, obj: GenerateReqInput, request: Any) -> list[Any]:
        return [answer async for answer in self.generate_request(obj, request)]

    async def told(self, rid: str, reason: str | None = None) -> None:
        """Have the manager hear a token of a request, the last one if there is a ``reason``."""
        values = dict.fromkeys(name for name, _ in adapter.controls.list_fields(BatchTokenIDOutput))
        values |= {name: [0] for name in ("prompt_tokens", "reasoning_tokens", "completion_tokens", "cached_tokens")}
        values |= {"rids": [rid], "output_ids": [[5]], "retraction_counts": [0]}
        values["finished_reasons"] = [reason and {"type": reason}]
        await self._handle_batch_output(BatchTokenIDOutput(**values))

    def told_aborted(self, rid: str = "r", **reason: Any) -> None:
        """Have the manager hear that a rank has aborted a request that waited."""
        reason = {"type": "abort", "message": "Abort in waiting queue"} | reason
        self._handle_abort_req(AbortReq(rid=rid, finished_reason=reason))


async def settle() -> None:
    """Let everybody go on as far as they can without a rank."""
    for _ in range(50):
        await asyncio.sleep(0)
