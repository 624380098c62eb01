"""Drafts of a trained model (:class:`DraftModel`): an EAGLE-3 head (Li et al., NeurIPS 2025).

The head is one decoder layer.  From what the model's layers made of a token (its *features*) and from the token after
it, it predicts the one after that; its own output stands for the features of what it has drafted.  Each rank has the
whole head, and all ranks of a group draft the same.

The head attends to the last :data:`WINDOW` tokens of a request.  As there is one layer, their keys and values follow
from features and tokens alone: nothing has to be computed anew for a prompt.  Ranks that take a request over get those
of the last :data:`KEPT` tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from sglang_pat import files
from sglang_pat.config import MOST_DRAFTS

WINDOW = 512
"""Tokens of a request that the head attends to."""
KEPT = 128
"""Tokens of a request of which other ranks are told: docs/results/speculation.md has what fewer and more give."""
PLACES = WINDOW + MOST_DRAFTS
"""Places for keys and values of a request: those of drafts come in on top."""

Embed = Callable[[torch.Tensor], torch.Tensor]
"""Embeddings ``[n, hidden]`` of tokens ``[n]``; all ranks of the group call it together."""


class HeadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a head's ``config.json`` that count here."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float = 1e-6
    head_dim: int | None = None
    hidden_act: Literal["silu"] = "silu"
    norm_output: bool = False
    norm_before_residual: Literal[False] = False
    eagle_config: dict[str, Any] | None = None

    def list_layers(self, num_layers: int) -> list[int]:
        """Layers of a model of ``num_layers`` whose *inputs* are the features.

        By default SGLang's; ``eagle_aux_hidden_state_layer_ids`` counts outputs.
        """
        named = (self.eagle_config or {}).get("eagle_aux_hidden_state_layer_ids")
        return [layer + 1 for layer in named] if named else [2, num_layers // 2, num_layers - 3]

    @property
    def width(self) -> int:
        """Size of a head of attention."""
        return self.head_dim or self.hidden_size // self.num_attention_heads


def read_config(folder: Path) -> HeadConfig:
    """Read the ``config.json`` of a head.

    Raises:
        ValueError: it cannot be read, or is not that of an EAGLE-3 head that is supported; one line.
    """
    try:
        return files.decode(files.read(folder / "config.json"), HeadConfig)
    except ValueError as error:
        advice = "give the folder of an EAGLE-3 head with a vocabulary of its own (draft_vocab_size)"
        raise ValueError(f"config.json: {error}; {advice}") from None


def _list_files(folder: Path) -> list[Path]:
    paths = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    if not paths:
        raise ValueError("no *.safetensors and no pytorch_model*.bin in it")
    return paths


def count_head_bytes(folder: Path, lines: int, item: int) -> int:
    """Bytes of a rank for the head in ``folder``, with keys and values of ``lines`` requests.

    Args:
        item: bytes of a number of the model; the weights count as they are stored.

    Raises:
        ValueError: there is no head that is supported; one line.
    """
    config = read_config(folder)
    key_values = lines * PLACES * 2 * config.num_key_value_heads * config.width * item
    return key_values + sum(path.stat().st_size for path in _list_files(folder))


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Read the weights of a head, by the names of this module: without ``midlayer.`` or ``layers.0.``.

    Raises:
        ValueError: there are none.
    """
    weights: dict[str, torch.Tensor] = {}
    for path in _list_files(folder):
        stored = path.suffix == ".safetensors"
        weights |= load_file(path) if stored else torch.load(path, map_location="cpu", weights_only=True)
    return {name.removeprefix("midlayer.").removeprefix("layers.0."): value for name, value in weights.items()}


@dataclass(frozen=True)
class Pairs:
    """Features and the tokens after them, some of several requests; of each in the order of positions.

    Attributes:
        lines: line of each request, int64 ``[pairs]``.
        positions: int64 ``[pairs]``; ``tokens``: those at ``positions`` + 1.
        features: ``[pairs, features]``.
        last: index of the last pair of each request, int64 ``[requests]``.
    """

    lines: torch.Tensor
    positions: torch.Tensor
    tokens: torch.Tensor
    features: torch.Tensor
    last: torch.Tensor


@dataclass(frozen=True)
class Learnt:
    """What the head knows of a request, for ranks that lack it; in host memory.

    Attributes:
        key_values: of the last :data:`KEPT` pairs, ``[KEPT, 2, kv_heads, width]``.
        known: which of these there are, bool ``[KEPT]``.
        hidden: features of the last pair, joined, ``[hidden]``.
        last: its position and token, int64 ``[2]``.
    """

    key_values: torch.Tensor
    known: torch.Tensor
    hidden: torch.Tensor
    last: torch.Tensor


class DraftModel:
    """An EAGLE-3 head, with keys and values of the requests on ``lines``.

    Args:
        lines: most requests at once.

    Raises:
        ValueError: a weight is missing, or has another shape; one line.
    """

    def __init__(
        self, folder: Path, config: HeadConfig, lines: int, dtype: torch.dtype, device: str | torch.device
    ) -> None:
        from transformers import LlamaConfig  # they take seconds
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        self.config = config
        weights = read_weights(folder)
        hidden, heads, kv_heads, width = (
            config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.width,
        )  # fmt: skip

        def take(name: str, *shape: int | None) -> torch.Tensor:
            value = weights.pop(name, None)
            if value is None:
                raise ValueError(f"it has no weight {name}")
            if len(shape) != value.dim() or any(n not in (None, m) for n, m in zip(shape, value.shape, strict=True)):
                raise ValueError(f"{name} has shape {tuple(value.shape)}, not {shape}")
            return value.to(device, dtype if value.is_floating_point() else None)

        self._join = take("fc.weight", hidden, None)
        self._norm_token = take("input_layernorm.weight", hidden)
        self._norm_features = take("hidden_norm.weight", hidden)
        self._query = take("self_attn.q_proj.weight", heads * width, 2 * hidden)
        keys, values = (take(f"self_attn.{name}_proj.weight", kv_heads * width, 2 * hidden) for name in "kv")
        self._key_value = torch.cat([keys, values])
        self._output = take("self_attn.o_proj.weight", hidden, heads * width)
        self._norm_mlp = take("post_attention_layernorm.weight", hidden)
        inner = config.intermediate_size
        self._gate_up = torch.cat([take(f"mlp.{name}_proj.weight", inner, hidden) for name in ("gate", "up")])
        self._down = take("mlp.down_proj.weight", hidden, inner)
        self._norm, self._lm_head = take("norm.weight", hidden), take("lm_head.weight", config.draft_vocab_size, hidden)
        self._embedding = take("embed_tokens.weight", None, hidden) if "embed_tokens.weight" in weights else None
        ids = torch.arange(config.draft_vocab_size, device=device)
        self._ids = ids + take("d2t", config.draft_vocab_size) if "d2t" in weights else ids
        if others := sorted(weights.keys() - {"t2d"}):  # t2d says of each token whether it can be drafted
            raise ValueError(f"it has weights that an EAGLE-3 head of one layer has not: {', '.join(others[:4])}")
        self._rotary = LlamaRotaryEmbedding(LlamaConfig(**json.loads((folder / "config.json").read_text()))).to(device)
        self._kv = torch.zeros(lines, PLACES, 2, kv_heads, width, dtype=dtype, device=device)
        self._at = torch.full((lines, PLACES), -1, device=device)
        """Position of each place; -1: none."""
        self._hidden = torch.zeros(lines, hidden, dtype=dtype, device=device)
        """Features of the last pair of each line, joined."""
        self._last = torch.zeros(2, lines, dtype=torch.int64, device=device)
        """Position and token of the last pair of each line."""

    def check(self, features: int, hidden: int, vocabulary: int) -> None:
        """Check that the head is one of a model with these sizes: of a token's features, of its layers, and the number
        of its tokens.

        Raises:
            ValueError: it is not; one line.
        """
        own, tokens = self.config, int(self._ids.max()) + 1
        sizes = self._join.shape[1], own.hidden_size if self._embedding is None else hidden
        if sizes != (features, hidden) or tokens > vocabulary:
            raise ValueError(
                f"it is the head of another model: of {sizes[0]} features, hidden size {own.hidden_size} and {tokens} "
                f"tokens, not {features}, {hidden} and {vocabulary}"
            )

    def count_bytes(self) -> int:
        """Bytes of the weights that a draft reads."""
        read = self._query, self._key_value, self._output, self._gate_up, self._down, self._lm_head
        return sum(weight.nbytes for weight in read)

    def forget(self, line: int) -> None:
        """Forget the request that was on ``line``."""
        self._at[line] = -1

    def learn(self, pairs: Pairs, embed: Embed) -> None:
        """Take in pairs; no more than :data:`WINDOW` of a request."""
        joined = pairs.features
        if joined.shape[1] != self.config.hidden_size:  # else SGLang leaves it out, too
            joined = F.linear(joined, self._join)
        both = self._join_with_tokens(joined, pairs.tokens, embed)
        self._store(both, pairs.lines, pairs.positions)
        lines = pairs.lines[pairs.last]
        self._hidden[lines] = joined[pairs.last]
        self._last[:, lines] = torch.stack([pairs.positions[pairs.last], pairs.tokens[pairs.last]])

    def read(self, lines: torch.Tensor) -> list[Learnt]:
        """What is known of the requests on ``lines``, int64 ``[requests]``."""
        where, positions = self._find_last_places(lines)
        parts = self._kv[where], self._at[where] == positions, self._hidden[lines], self._last[:, lines].T
        rows = zip(*(part.cpu() for part in parts), strict=True)
        return [Learnt(*(part.clone() for part in row)) for row in rows]  # a view is pickled with all of its tensor

    def write(self, lines: torch.Tensor, learnt: Sequence[Learnt]) -> None:
        """Know of the requests on ``lines`` what was ``learnt`` of them elsewhere, and nothing else."""
        rows = zip(*((one.key_values, one.known, one.hidden, one.last) for one in learnt), strict=True)
        key_values, mask, hidden, last = (torch.stack(row).to(lines.device) for row in rows)
        self._last[:, lines], self._hidden[lines] = last.T, hidden
        where, positions = self._find_last_places(lines)
        self._at[lines] = -1
        self._kv[where], self._at[where] = key_values, torch.where(mask, positions, -1)

    def _find_last_places(self, lines: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
        """Line and place, and position, of the last :data:`KEPT` pairs on each of ``lines``."""
        positions = self._last[0, lines, None] + torch.arange(1 - KEPT, 1, device=lines.device)
        return (lines[:, None], positions % PLACES), positions

    def draft(self, lines: torch.Tensor, count: int, embed: Embed) -> torch.Tensor:
        """Tokens that are expected next on these ``lines``, int64 ``[lines, count]``."""
        hidden, (positions, tokens) = self._hidden[lines], self._last[:, lines]
        drafted = []
        for number in range(count):
            both = self._join_with_tokens(hidden, tokens, embed)
            if number:  # the first pair's are there
                self._store(both, lines, positions)
            residual = hidden + F.linear(self._attend(both, lines, positions), self._output)
            gate, up = F.linear(self._normalize(residual, self._norm_mlp), self._gate_up).chunk(2, dim=-1)
            residual = residual + F.linear(F.silu(gate) * up, self._down)
            normed = self._normalize(residual, self._norm)
            hidden, positions = normed if self.config.norm_output else residual, positions + 1
            tokens = self._ids[F.linear(normed, self._lm_head).argmax(dim=-1)]
            drafted.append(tokens)
        return torch.stack(drafted, dim=1)

    def _normalize(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(rows, weight.shape, weight, self.config.rms_norm_eps)

    def _join_with_tokens(self, features: torch.Tensor, tokens: torch.Tensor, embed: Embed) -> torch.Tensor:
        """The layer's input ``[rows, 2 * hidden]``: tokens and features, normed."""
        embedded = embed(tokens) if self._embedding is None else F.embedding(tokens, self._embedding)
        parts = self._normalize(embedded, self._norm_token), self._normalize(features, self._norm_features)
        return torch.cat(parts, dim=-1)

    def _rotate(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """``rows``, ``[rows, heads, width]``, rotated by their ``positions``."""
        cos, sin = (each[0, :, None] for each in self._rotary(rows, positions[None]))
        first, second = rows.chunk(2, dim=-1)
        return rows * cos + torch.cat([-second, first], dim=-1) * sin

    def _store(self, both: torch.Tensor, lines: torch.Tensor, positions: torch.Tensor) -> None:
        keys, values = F.linear(both, self._key_value).view(len(both), 2, -1, self.config.width).unbind(1)
        places = positions % PLACES
        self._kv[lines, places] = torch.stack([self._rotate(keys, positions), values], dim=1)
        self._at[lines, places] = positions

    def _attend(self, both: torch.Tensor, lines: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Attention of one row of each line, ``[lines, heads * width]``, to what is on the line up to its position."""
        query = F.linear(both, self._query).view(len(both), -1, self.config.width)
        keys, values = self._kv[lines].permute(2, 0, 3, 1, 4)
        at, now = self._at[lines], positions[:, None]
        seen = (at >= 0) & (at <= now) & (at > now - WINDOW)
        out = F.scaled_dot_product_attention(
            self._rotate(query, positions)[:, :, None], keys, values, attn_mask=seen[:, None, None], enable_gqa=True
        )
        return out.reshape(len(both), -1)
