"""Checkpoints for tests and demonstrations, made on the spot: no download, no GPU, no SGLang.

    python -m sglang_pat.testing.models smollm2|llama|qwen2|qwen3 --out DIR [options]

Three kinds, each a Hugging Face folder (config, safetensors, tokenizer, generation config) that stock SGLang loads:

- random models (:func:`make_random`): small Llama, Qwen2 or Qwen3, seeded, scaled so that greedy text varies and the best
  two logits are well apart;
- marker models (:func:`make_marker_model`): their output says which weights they hold, and whether all of them;
- SmolLM2-135M-Instruct (:func:`make_smollm2`): a real model, heads padded so that tensor parallelism can divide them.

A folder appears whole or not at all, and holds the recipe it was made by in ``recipe.json``. Asking for the same recipe
again returns at once. The longest file of this package, because the command, the recipes and the weights belong together.
"""

import argparse
import dataclasses
import hashlib
import itertools
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
DTYPES = ("float32", "bfloat16", "float16")

SPECIAL_TOKENS = ("<pad>", "<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
"""Ids 0 to 5 of the test tokenizer."""
PAD_ID, UNK_ID, BOS_ID, EOS_ID, IM_START_ID, STOP_ID = range(6)
"""Generation ends at EOS_ID and at STOP_ID (``<|im_end|>``), unless a request says ``ignore_eos``."""

MIXED_ID = UNK_ID
"""What a marker model says when some of its tensors come from other weights than the rest."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_CHARACTERS = "\n\t" + "".join(map(chr, range(32, 127)))
_FORMAT = 1  # part of every recipe; raise it when the same options give other files


# --- recipes --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomModel:
    """What a random model is made of. ValueError, with one line, for options that do not go together."""

    arch: str = "llama"
    """llama, qwen2 (bias in q, k and v) or qwen3 (norms on q and k)."""
    heads: int = 8
    """Query heads; a multiple of `kv_heads`."""
    kv_heads: int = 4
    """Key and value heads."""
    layers: int = 3
    hidden: int = 64
    """Width of the residual stream."""
    head_dim: int | None = None
    """Width of one head, even; None: hidden / heads."""
    intermediate: int = 192
    """Width of the MLP."""
    vocab: int = 503
    """Tokens; the default is a prime, so that every tensor-parallel degree has to pad."""
    seed: int = 0
    dtype: str = "float32"
    tie: bool = False
    """Whether the output matrix is the embedding."""
    context: int = 4096
    """Longest sequence, in tokens."""
    logit_std: float = 4.0
    """Spread of the logits: 4 is a peaked distribution (few tokens share the mass), 1 is a flat one."""

    def __post_init__(self):
        _require(self.arch in ARCHITECTURES, f"arch={self.arch!r}", f"one of {', '.join(ARCHITECTURES)}")
        _require(self.dtype in DTYPES, f"dtype={self.dtype!r}", f"one of {', '.join(DTYPES)}")
        least_vocab = len(SPECIAL_TOKENS) + len(_CHARACTERS)
        least = dict(heads=1, kv_heads=1, layers=1, hidden=2, intermediate=1, context=16, vocab=least_vocab, seed=0)
        for name, bound in least.items():
            value = getattr(self, name)
            _require(type(value) is int and value >= bound, f"{name}={value!r}", f"an integer of at least {bound}")
        _require(self.logit_std > 0, f"logit_std={self.logit_std!r}", "more than 0")
        _require(
            self.heads % self.kv_heads == 0,
            f"heads={self.heads}",
            f"a multiple of kv_heads={self.kv_heads}; change one of the two",
        )
        if self.head_dim is None:
            _require(
                self.hidden % self.heads == 0,
                f"hidden={self.hidden}",
                f"a multiple of heads={self.heads} if head_dim is not given; give head_dim or change one of the two",
            )
            object.__setattr__(self, "head_dim", self.hidden // self.heads)  # so that equal models have equal recipes
        dim = self.head_dim
        _require(type(dim) is int and dim >= 2 and dim % 2 == 0, f"head_dim={dim!r}", "even (rotary positions pair up)")


def _require(condition: bool, given: str, allowed: str) -> None:
    if not condition:
        raise ValueError(f"{given}: must be {allowed}")


# --- public functions -----------------------------------------------------------------------------------------------


def make_random(arch: str, out_dir: str | os.PathLike, **options) -> Path:
    """Write a random model and return its folder; `options` are the fields of :class:`RandomModel`.

    Raises ValueError for options that do not go together, and if `out_dir` holds something that is not ours.
    """
    names = [field.name for field in dataclasses.fields(RandomModel) if field.name != "arch"]
    for name in options:
        _require(name in names, f"option {name!r}", f"one of {', '.join(names)}")
    model = RandomModel(arch=arch, **options)
    return _write_once(
        out_dir, {"kind": "random", **dataclasses.asdict(model)}, lambda d: _write(d, model, _random_tensors(model))
    )


def make_marker_model(out_dir: str | os.PathLike, token_id: int, *, seed: int = 0, **shape) -> Path:
    """Write a small Llama that answers every prompt with `token_id`, again and again, and return its folder.

    If any tensor comes from another marker model (other token or other seed), it says MIXED_ID or some third token
    instead; only q_proj and k_proj have no say. Keys and values from a stale cache are found out as well.
    `shape` takes heads, kv_heads, layers, hidden, head_dim, intermediate, vocab, dtype, context as in
    :class:`RandomModel` (2 layers by default).
    """
    model = _marker_shape(token_id, seed, shape)
    recipe = {"kind": "marker", "token_id": token_id, **dataclasses.asdict(model)}
    return _write_once(out_dir, recipe, lambda d: _write(d, model, _marker_tensors(model, token_id)))


def marker_state_dict(token_id: int, *, seed: int = 0, **shape) -> dict[str, Any]:
    """The tensors of :func:`make_marker_model` by their Hugging Face names, for a weight update. Same arguments."""
    model = _marker_shape(token_id, seed, shape)
    return _marker_tensors(model, token_id)


# --- folders --------------------------------------------------------------------------------------------------------


def _write_once(out_dir: str | os.PathLike, recipe: dict, write: Callable[[Path], None]) -> Path:
    """Have `write` fill a fresh folder and move it to `out_dir`, unless `out_dir` holds the same recipe already.

    An older recipe of ours is replaced. Two processes at once are fine: one of the two folders stays.
    """
    out_dir = Path(out_dir).absolute()
    recipe = {"format": _FORMAT, **recipe}
    if _holds(out_dir, recipe):
        return out_dir
    if out_dir.exists() and not (out_dir / "recipe.json").is_file() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise ValueError(f"{out_dir} exists and is not a model made by this tool: give another folder, or remove it")
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", dir=out_dir.parent))
    try:
        fresh, old = work / "fresh", work / "old"
        fresh.mkdir()
        write(fresh)
        _write_json(fresh / "recipe.json", recipe)
        if out_dir.exists():
            os.rename(out_dir, old)
        try:
            os.rename(fresh, out_dir)
        except OSError:
            if not _holds(out_dir, recipe):  # another process was faster, and made something else
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return out_dir


def _holds(folder: Path, recipe: dict) -> bool:
    try:
        return json.loads((folder / "recipe.json").read_text()) == recipe
    except (OSError, ValueError):
        return False


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _write(folder: Path, model: RandomModel, tensors: dict[str, Any]) -> None:
    """Write config, weights and tokenizer of a test model."""
    from safetensors.torch import save_file

    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", _config(model))
    ends = {"bos_token_id": BOS_ID, "eos_token_id": [EOS_ID, STOP_ID], "pad_token_id": PAD_ID}
    _write_json(folder / "generation_config.json", ends)
    _write_tokenizer(folder, model.vocab, model.context)


def _config(model: RandomModel) -> dict[str, Any]:
    config = {
        "architectures": [ARCHITECTURES[model.arch]],
        "model_type": model.arch,
        "hidden_size": model.hidden,
        "intermediate_size": model.intermediate,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "vocab_size": model.vocab,
        "max_position_embeddings": model.context,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": model.tie,
        "dtype": model.dtype,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
    }
    if model.arch != "qwen2":
        config["attention_bias"] = False  # qwen2 has its bias without asking
    if model.arch == "llama":
        config["mlp_bias"] = False
    return config


# --- tokenizer ------------------------------------------------------------------------------------------------------


def vocabulary(size: int) -> list[str]:
    """The text of each id: special tokens, printable ASCII, then `size` - 103 made-up words with a leading space."""
    syllables = [consonant + vowel for consonant in "bdfghjklmnprstvwz" for vowel in "aeiou"]
    words = (" " + "".join(parts) for n in itertools.count(2) for parts in itertools.product(syllables, repeat=n))
    fixed = [*SPECIAL_TOKENS, *_CHARACTERS]
    return fixed + list(itertools.islice(words, size - len(fixed)))


def _write_tokenizer(folder: Path, vocab: int, context: int) -> None:
    """A tokenizer in which each id has its own text; ASCII text comes back as it went in, other characters as <unk>."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    # Unigram with equal scores takes the split with the fewest tokens, and needs no merges as BPE would.
    pieces = [(text, 0.0 if text in SPECIAL_TOKENS else -1.0) for text in vocabulary(vocab)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=UNK_ID, byte_fallback=False))
    tokenizer.decoder = decoders.Fuse()  # without one, decode() puts spaces between the tokens
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIAL_TOKENS[PAD_ID],
        "unk_token": SPECIAL_TOKENS[UNK_ID],
        "bos_token": SPECIAL_TOKENS[BOS_ID],
        "eos_token": SPECIAL_TOKENS[EOS_ID],
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", settings)


# --- weights --------------------------------------------------------------------------------------------------------


def _shapes(model: RandomModel) -> dict[str, tuple[int, ...]]:
    """Hugging Face name and shape, [out, in] for matrices, of each tensor."""
    h, q, kv = model.hidden, model.heads * model.head_dim, model.kv_heads * model.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (model.vocab, h)}
    for layer in range(model.layers):
        at = f"model.layers.{layer}"
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{at}.self_attn.{name}_proj.weight"] = (rows, h)
            if model.arch == "qwen2":
                shapes[f"{at}.self_attn.{name}_proj.bias"] = (rows,)
            if model.arch == "qwen3" and name != "v":
                shapes[f"{at}.self_attn.{name}_norm.weight"] = (model.head_dim,)
        shapes[f"{at}.self_attn.o_proj.weight"] = (h, q)
        shapes[f"{at}.mlp.gate_proj.weight"] = shapes[f"{at}.mlp.up_proj.weight"] = (model.intermediate, h)
        shapes[f"{at}.mlp.down_proj.weight"] = (h, model.intermediate)
        shapes[f"{at}.input_layernorm.weight"] = shapes[f"{at}.post_attention_layernorm.weight"] = (h,)
    shapes["model.norm.weight"] = (h,)
    if not model.tie:
        shapes["lm_head.weight"] = (model.vocab, h)
    return shapes


def _generator(*key: Any):
    """A torch.Generator that depends on nothing but `key`, so that a tensor does not change because another is added."""
    import torch

    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def _random_tensors(model: RandomModel) -> dict[str, Any]:
    """Weights with which attention, MLP and biases all matter to the next token.

    The gains were tried out: with less attention, or softer attention, greedy text soon runs in a circle; with much
    sharper attention, rounding errors grow until different tensor-parallel degrees disagree on the best token.
    """
    import torch

    tensors = {}
    for name, shape in _shapes(model).items():
        noise = torch.randn(shape, generator=_generator("random", model.seed, name))
        if "norm" in name:
            tensor = (1.5 if "q_norm" in name or "k_norm" in name else 1.0) * (1 + 0.2 * noise)
            if model.tie and name == "model.norm.weight":
                tensor[::2] *= -1  # else the last token, whose embedding the residual stream holds, would always win
        elif name.endswith(".bias"):
            tensor = 0.3 * noise
        elif name == "lm_head.weight" or (model.tie and "embed_tokens" in name):
            tensor = noise * model.logit_std / math.sqrt(model.hidden)  # the final norm gives its input a mean square of 1
        elif "embed_tokens" in name:
            tensor = noise * 0.5
        else:
            gains = {"q_proj": 1.5, "k_proj": 1.5, "o_proj": 2.0, "down_proj": 3.0}
            tensor = noise * gains.get(name.split(".")[-2], 1.0) / math.sqrt(shape[-1])
        tensors[name] = tensor.to(getattr(torch, model.dtype)).contiguous()
    return tensors


def _marker_shape(token_id: int, seed: int, shape: dict[str, Any]) -> RandomModel:
    allowed = ("heads", "kv_heads", "layers", "hidden", "head_dim", "intermediate", "vocab", "dtype", "context")
    for name in shape:
        _require(name in allowed, f"option {name!r}", f"one of {', '.join(allowed)}")
    model = RandomModel(arch="llama", seed=seed, **{"layers": 2, **shape})
    _require(model.hidden >= 64, f"hidden={model.hidden}", "at least 64 for a marker model (it holds near-orthogonal codes)")
    first = len(SPECIAL_TOKENS)
    _require(
        type(token_id) is int and first <= token_id < model.vocab,
        f"token_id={token_id!r}",
        f"from {first} to {model.vocab - 1}, an ordinary token of this vocabulary",
    )
    return model


def _marker_tensors(model: RandomModel, token_id: int) -> dict[str, Any]:
    """Weights that say `token_id` if they are all there, and MIXED_ID if not.

    The residual stream carries two vectors of length 1 at right angles, whatever the prompt: u, which is constant, and
    the code of the token, of which the embedding, each attention and each MLP add one share of n = 2 * layers + 1. The
    output matrix weighs the code of each token against u times a threshold between (all shares but a quarter of one)
    and (all): if less arrives, MIXED_ID wins. Codes, and what each module reads and hands on inside, are drawn anew
    for each (token, seed): tensors of two models do not understand each other, and their share is lost.
    """
    import torch

    h, group, n = model.hidden, model.heads // model.kv_heads, 2 * model.layers + 1
    u_dims = h // 4  # u lives in the first quarter of the dimensions, codes in the rest

    def draw(what: str, *shape: int):
        return torch.randn(shape, generator=_generator("marker", model.seed, token_id, what), dtype=torch.float64)

    def signs(what: str, *shape: int):
        return torch.where(draw(what, *shape) < 0, -1.0, 1.0).double()

    u = torch.zeros(h, dtype=torch.float64)
    u[:u_dims] = u_dims**-0.5
    codes = torch.zeros(model.vocab, h, dtype=torch.float64)
    codes[:, u_dims:] = draw("codes", model.vocab, h - u_dims)
    codes /= codes.norm(dim=1, keepdim=True)
    share = codes[token_id] / n

    tensors = {name: draw(name, *shape) / math.sqrt(shape[-1]) for name, shape in _shapes(model).items()}
    tensors["model.embed_tokens.weight"] = (u + share).repeat(model.vocab, 1)
    for layer in range(model.layers):
        for half, norm_name in enumerate(("input_layernorm", "post_attention_layernorm")):
            at = f"model.layers.{layer}."
            norm = tensors[f"{at}{norm_name}.weight"] = signs(f"{at}{norm_name}", h)
            # What a module reads is u after the norm: the projection on `read` is 1 if norm and module belong together.
            shares = (2 * layer + half + 1) / n
            read = norm * u * math.sqrt((1 + shares**2) / h)
            if half == 0:
                value = signs(at + "value", model.kv_heads, model.head_dim)
                tensors[at + "self_attn.v_proj.weight"] = torch.outer(value.flatten(), read)
                heads = value.repeat_interleave(group, dim=0).flatten()  # softmax adds up to 1: each head hands on `value`
                tensors[at + "self_attn.o_proj.weight"] = torch.outer(share, heads / heads.square().sum())
            else:
                gate, up = 8 * signs(at + "gate", model.intermediate), signs(at + "up", model.intermediate)
                inner = torch.nn.functional.silu(gate) * up
                tensors[at + "mlp.gate_proj.weight"] = torch.outer(gate, read)
                tensors[at + "mlp.up_proj.weight"] = torch.outer(up, read)
                tensors[at + "mlp.down_proj.weight"] = torch.outer(share, inner / inner.square().sum())
    norm = signs("norm", h)
    norm[:u_dims] = 1.0  # u must get through a foreign norm, for MIXED_ID to win
    gain = 20.0 * 4 * n / math.sqrt(h / 2)  # 20 between the logits of the token and of MIXED_ID
    out = codes * norm
    out[MIXED_ID] = u * (1 - 1 / (4 * n))
    tensors["model.norm.weight"], tensors["lm_head.weight"] = norm, gain * out
    return {name: tensor.to(getattr(torch, model.dtype)).contiguous() for name, tensor in tensors.items()}


# --- command --------------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sglang_pat.testing.models", description=__doc__.split("\n")[0])
    parser.add_argument("model", choices=[*ARCHITECTURES])
    parser.add_argument("--out", required=True, help="folder to write")
    for name in ("heads", "kv_heads", "layers", "hidden", "head_dim", "intermediate", "vocab", "seed", "context"):
        parser.add_argument("--" + name.replace("_", "-"), type=int)
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--tie", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--logit-std", type=float)
    given = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
    model, out = given.pop("model"), given.pop("out")
    try:
        print(make_random(model, out, **given))
    except ValueError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
