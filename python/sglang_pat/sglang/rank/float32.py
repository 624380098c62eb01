"""Float32 on a GPU, in which all layouts must give the same tokens: what SGLang lacks for it."""

from __future__ import annotations

from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.server_args import ServerArgs


def norms_by_torch(args: ServerArgs) -> None:
    """In float32 on a GPU have SGLang's norms computed by torch; to be called before a model is built.

    SGLang's kernel library has no float32 for a norm without a residual, with which every model begins.
    """
    if args.device == "cuda" and args.dtype in ("float32", "float"):
        RMSNorm.forward_cuda = RMSNorm.forward_native
