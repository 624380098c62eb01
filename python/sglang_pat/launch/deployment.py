"""What a profile holds for: the fingerprint of this deployment."""

from __future__ import annotations

from importlib import metadata

import torch
from sglang.srt.configs.model_config import ModelConfig

from sglang_pat.config import AdaptiveConfig
from sglang_pat.cpu import shm
from sglang_pat.job_settings import read_files
from sglang_pat.launch.args import AdaptiveServerArgs
from sglang_pat.predict import profile as profiles
from sglang_pat.predict.profile import Fingerprint, Profile
from sglang_pat.version import __version__


def deployment(
    args: AdaptiveServerArgs, config: AdaptiveConfig, kv_tokens: int = 0, max_running: int = 0
) -> Fingerprint:
    """The fingerprint of an engine with these arguments.

    Args:
        kv_tokens, max_running: of one replica of the base layout; known once a rank is up.
    """
    model = ModelConfig.from_server_args(args)
    hf = model.hf_text_config
    sizes = (
        f"L{model.num_hidden_layers} H{model.hidden_size} heads{model.num_attention_heads}/"
        f"{model.get_total_num_kv_heads()}x{model.head_dim} I{hf.intermediate_size} V{model.vocab_size}"
    )
    return Fingerprint(
        model=f"{(model.hf_config.architectures or ['?'])[0]} {sizes}",
        dtype=str(model.dtype).removeprefix("torch."),
        device=torch.cuda.get_device_name() if args.device == "cuda" else profiles.cpu_model(),
        attention=args.attention_backend or "default",
        num_ranks=config.num_ranks,
        base_tp=config.base.tp,
        degrees=tuple(layout.tp for layout in config.layouts),
        link=str(shm.current_link() or "none"),
        weights=config.weights,
        kv_exchange=config.kv_exchange,
        kv_tokens=kv_tokens,
        max_running=max_running,
        sglang=metadata.version("sglang"),
        torch=str(torch.__version__),
        package=__version__,
    )


def check_files(args: AdaptiveServerArgs, config: AdaptiveConfig) -> Profile | None:
    """The profile of ``--pat-profile``.

    Raises:
        ValueError: it is not of this deployment; as :func:`~sglang_pat.job_settings.read_files`.
    """
    profile = read_files(config)
    if profile is not None:
        profiles.check_fits(profile, deployment(args, config), args.pat_profile)
    return profile
