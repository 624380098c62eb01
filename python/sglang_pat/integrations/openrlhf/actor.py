"""OpenRLHF's engine actor, on an adaptive engine (:class:`RolloutActor`): the methods that its trainers and agents
call."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import Any

import ray
import torch
from openrlhf.trainer.ray.utils import get_physical_gpu_id
from openrlhf.trainer.ray.vllm_engine import _load_agent_executor
from openrlhf.utils.agent import SingleTurnAgentExecutor
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from sglang_pat.figures import Figures
from sglang_pat.host.inprocess import InProcessEngine
from sglang_pat.integrations.openrlhf.facade import GROUP, SamplingParams
from sglang_pat.integrations.openrlhf.given import WHERE, GivenArguments
from sglang_pat.messages import BeginRound, EndRound
from sglang_pat.server.attach import attach

ALL_TAGS = ("weights", "kv_cache")


@dataclass
class Logprob:
    logprob: float


@dataclass
class Completion:
    """One response; ``logprobs[i][token_ids[i]]`` is that of its i-th token."""

    token_ids: list[int]
    text: str
    finish_reason: str
    logprobs: list[dict[int, Logprob]] | None
    index: int = 0


@dataclass
class RequestOutput:
    outputs: list[Completion]
    finished: bool = True


@ray.remote
class RolloutActor:
    """OpenRLHF's rollout actor; see ``openrlhf/trainer/ray/vllm_engine.py`` for what is asked of it."""

    async def __init__(
        self,
        *,
        job_arguments: GivenArguments,
        model: str,
        tensor_parallel_size: int,
        seed: int,
        max_model_len: int,
        dtype: str,
        trust_remote_code: bool,
        enable_prefix_caching: bool,
        enforce_eager: bool,
        gpu_memory_utilization: float,
        enable_sleep_mode: bool,
        num_gpus: float,
        bundle_indices: list[int] | None = None,
        agent_func_path: str | None = None,
        remote_rm_url: Any = None,
        full_determinism: bool = False,
        limit_mm_per_prompt: dict[str, int] | None = None,
        logprobs_mode: str | None = None,
        **of_vllm: Any,
    ) -> None:
        if full_determinism or limit_mm_per_prompt:
            what = "--train.full_determinism_enable" if full_determinism else "images"
            raise ValueError(f"{what}: not with this engine; leave it out")
        own = _load_agent_executor(agent_func_path) if agent_func_path else None
        self.executor = own or SingleTurnAgentExecutor(remote_rm_url)
        self._gpus = _set_visible_gpus(tensor_parallel_size, bundle_indices, num_gpus)
        attach(job_arguments.pat, WHERE)
        arguments: dict[str, Any] = {
            "model_path": model,
            "tp_size": tensor_parallel_size,
            "random_seed": seed,
            "context_length": max_model_len,
            "dtype": dtype,
            "trust_remote_code": trust_remote_code,
            "disable_radix_cache": not enable_prefix_caching,
            "disable_cuda_graph": enforce_eager,
            "mem_fraction_static": gpu_memory_utilization,
            "enable_memory_saver": enable_sleep_mode,
            "enable_weights_cpu_backup": enable_sleep_mode,
            "log_level": "error",
        }
        self._engine = InProcessEngine(arguments | job_arguments.sglang)
        self._ranks = tensor_parallel_size
        self._asleep: set[str] = set()
        self._unfinished = 0

    # -- weights ---------------------------------------------------------------------------------------

    async def init_process_group(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str,
        use_ray: bool,
    ) -> None:  # fmt: skip
        """Have all ranks of the engine join the trainer's group."""
        if use_ray:
            raise ValueError("--vllm.sync_with_ray: not with this engine; leave it out")
        await self._engine.join_update_group(master_address, master_port, rank_offset, world_size, GROUP, backend)

    async def update_weight(self, name: str, dtype: Any, shape: Any, empty_cache: bool = False) -> None:
        """Update one parameter, which the trainer broadcasts at the same time."""
        await self._engine.receive_weight(GROUP, name, str(dtype).removeprefix("torch."), list(shape), empty_cache)

    async def update_weight_cuda_ipc(
        self, name: str, dtype: Any, shape: Any, ipc_handles: dict[str, tuple], empty_cache: bool = False
    ) -> None:
        """Update one parameter, of which each of the engine's GPUs holds a copy of the trainer's."""
        same_gpus = all(gpu in ipc_handles for gpu in self._gpus) and len(set(self._gpus)) == self._ranks
        if not same_gpus and torch.cuda.is_available():
            raise ValueError(
                f"the trainer's tensors are on the GPUs {', '.join(ipc_handles)}, this engine's are "
                f"{', '.join(self._gpus)}: unset RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES, if it is set"
            )
        # Without GPUs their names mean nothing: one copy each, in their order.
        order = self._gpus if same_gpus else sorted(ipc_handles)
        handles = [_Handle(*ipc_handles[gpu], device=rank if same_gpus else None) for rank, gpu in enumerate(order)]
        await self._engine.open_weight(name, handles, empty_cache)

    async def reset_prefix_cache(self) -> None:
        await self._engine.flush_cache()

    # -- pause, sleep ------------------------------------------------------------------------------------

    async def pause_generation(self) -> None:
        """Pause the engine with its requests; they go on with KV that is computed anew by the weights that are there
        then."""
        await self._engine.pause("retract")

    async def resume_generation(self) -> None:
        await self._engine.resume()

    async def sleep(self, level: int = 1) -> None:
        """Give the memory of weights (kept in host memory) and KV to the trainer."""
        tags = [tag for tag in ALL_TAGS if tag not in self._asleep]
        await self._engine.release_memory(tags)
        self._asleep.update(tags)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Take memory back; what is awake stays awake."""
        asleep = [tag for tag in tags or ALL_TAGS if tag in self._asleep]
        await self._engine.resume_memory(asleep)
        self._asleep.difference_update(asleep)

    # -- generation ----------------------------------------------------------------------------------------

    async def generate(
        self, prompt_token_ids: list[int], sampling_params: SamplingParams, multi_modal_data: Any = None
    ) -> RequestOutput:
        if multi_modal_data:
            raise ValueError("images: not with this engine; leave them out")
        wants_logprobs = sampling_params.logprobs is not None
        self._unfinished += 1
        try:
            answer = await self._engine.generate(
                list(prompt_token_ids), _translate_params(sampling_params), wants_logprobs
            )
        finally:
            self._unfinished -= 1
        meta = answer["meta_info"]
        pairs = meta.get("output_token_logprobs") or []
        completion = Completion(
            token_ids=list(answer["output_ids"]),
            text=answer.get("text", ""),
            finish_reason=meta["finish_reason"]["type"],
            logprobs=[{token: Logprob(value)} for value, token, _ in pairs] if wants_logprobs else None,
        )
        return RequestOutput([completion])

    def get_num_unfinished_requests(self) -> int:
        return self._unfinished

    async def generate_responses(
        self, prompt: str, label: str, sampling_params: SamplingParams, max_length: int, hf_tokenizer: Any,
        num_samples: int = 1, images: Any = None,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """``num_samples`` rollouts of one prompt by the job's agent."""
        arguments = {
            "prompt": prompt, "label": label, "sampling_params": sampling_params, "max_length": max_length,
            "hf_tokenizer": hf_tokenizer, "llm_engine": self, "images": images,
        }  # fmt: skip
        return await asyncio.gather(*(self.executor.execute(**arguments) for _ in range(num_samples)))

    def announce_round(self, message: BeginRound | EndRound) -> None:
        """Tell the engine of a round; the job's generator of samples calls this (:mod:`.generator`)."""
        self._engine.announce_round(message)

    async def get_totals(self) -> Figures:
        """What the engine did since its start."""
        return Figures.from_status(await self._engine.status())


class _Handle:
    """A tensor in another process's memory: unpickling it opens it.

    Args:
        rebuild, args: what torch's ``reduce_tensor`` returns.
        device: CUDA device as its opener counts them; None without GPUs.
    """

    def __init__(self, rebuild: Any, args: tuple, device: int | None) -> None:
        if device is not None:
            args = (*args[:6], device, *args[7:])  # of torch's rebuild_cuda_tensor: the sender's index
        self._reduced = rebuild, args

    def __reduce__(self) -> tuple:
        return self._reduced


_SAME = ("temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens")
_SAME += ("presence_penalty", "frequency_penalty", "repetition_penalty")
_RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
_RENAMED["no_stop_trim"] = "include_stop_str_in_output"


def _translate_params(params: SamplingParams) -> dict[str, Any]:
    """SGLang's names for vLLM's sampling parameters.

    Raises:
        ValueError: what an agent asks for cannot be had; one line.
    """
    if params.n != 1:
        raise ValueError(f"n of SamplingParams is {params.n}, must be 1 with this engine: ask for each response")
    if (params.logprobs or 0) > 1:
        raise ValueError(f"logprobs of SamplingParams is {params.logprobs}, must be 1: of others there are none")
    values = {name: getattr(params, name) for name in _SAME}
    values |= {ours: getattr(params, theirs) for ours, theirs in _RENAMED.items()}
    return {name: value for name, value in values.items() if value is not None}


@ray.remote(num_cpus=0, max_calls=1)
def _locate_bundle() -> tuple[str, list[str], str]:
    """Node of a bundle, its GPUs as Ray counts them, and the GPU's own name."""
    return ray.get_runtime_context().get_node_id(), [str(gpu) for gpu in ray.get_gpu_ids()], get_physical_gpu_id()


def _set_visible_gpus(ranks: int, bundles: list[int] | None, num_gpus: float) -> list[str]:
    """Make the engine's GPUs the visible ones; returns their own names, by rank.

    Raises:
        ValueError: they are on several nodes.
    """
    if bundles is None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in ray.get_gpu_ids())
        return [get_physical_gpu_id()]
    group = ray.util.get_current_placement_group()
    places = ray.get(
        [
            _locate_bundle.options(
                num_gpus=num_gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
            ).remote()
            for bundle in bundles
        ]
    )
    nodes = {node for node, _, _ in places}
    if nodes != {ray.get_runtime_context().get_node_id()}:
        raise ValueError(f"--vllm.tensor_parallel_size is {ranks}: an engine's GPUs are all on one node; give fewer")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu for _, gpus, _ in places for gpu in gpus)
    return [name for _, _, name in places]
