"""What a profile holds for: the fingerprint of this deployment."""

from __future__ import annotations

from importlib import metadata

import torch
from sglang.srt.configs.model_config import ModelConfig

from sglang_pat.comm import shm
from sglang_pat.coordinator import schedule
from sglang_pat.messages import ScheduleEntry
from sglang_pat.predict import profile as profiles
from sglang_pat.predict.profile import Fingerprint, Profile
from sglang_pat.sglang.launch.args import AdaptiveServerArgs
from sglang_pat.version import __version__


def deployment(args: AdaptiveServerArgs, kv_tokens: int = 0, max_running: int = 0) -> Fingerprint:
    """The fingerprint of an engine with these arguments.

    Args:
        kv_tokens, max_running: of one replica of the base layout; known once a rank is up.
    """
    config = args.adaptive_config()
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


def first_schedule(args: AdaptiveServerArgs) -> list[ScheduleEntry] | None:
    """The entries of ``--pat-schedule``, or none with ``--pat-log``, which counts requests as a schedule does.

    Raises:
        ValueError: one line; there are none to be had from the file.
    """
    if args.pat_schedule is None:
        return None if args.pat_log is None else []
    entries = schedule.read(args.pat_schedule)
    try:
        schedule.check_degrees(entries, args.adaptive_config().layouts)
    except ValueError as error:
        raise ValueError(f"--pat-schedule {args.pat_schedule}: {error}") from None
    return entries


def check_files(args: AdaptiveServerArgs) -> Profile | None:
    """The profile of ``--pat-profile``.

    Raises:
        ValueError: it is not of this deployment, ``--pat-schedule`` not a schedule for it, or ``--pat-log`` cannot be
            written.
    """
    first_schedule(args)
    profile = None
    if args.pat_profile is not None:
        profile = profiles.load(args.pat_profile)
        profiles.check_fits(profile, deployment(args), args.pat_profile)
    if args.pat_log is not None:
        try:
            open(args.pat_log, "ab").close()
        except OSError as error:
            raise ValueError(f"--pat-log {args.pat_log}: {error.strerror}; give a file that can be written") from None
    return profile
