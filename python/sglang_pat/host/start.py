"""What is looked at before anything is started; every refusal is a ``ValueError`` of one line."""

from __future__ import annotations

from sglang_pat.host.args import AdaptiveServerArgs, outer_view
from sglang_pat.host.contract import check_host
from sglang_pat.host.deployment import check_files
from sglang_pat.host.memory import planned


def ready(args: AdaptiveServerArgs) -> AdaptiveServerArgs:
    """The outer view of ``args``, checked and with its memory planned; what is ready already comes back as it is.

    Raises:
        HostMismatch: another SGLang.
        ValueError: files that cannot be used, memory that does not suffice.
    """
    if args.pat_base_tp:
        return args
    check_host()
    check_files(args)
    return outer_view(planned(args))
