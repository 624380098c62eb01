"""What a trained drafter gives: a small EAGLE-3 head, made here for SmolLM2-135M, beside drafts from texts.

    python bench/draft_head.py [--quick] [--head FOLDER] [--temperatures 1.0 0.7] [--json FILE]

The head learns from the model's own responses to problems of ``gsm_symbolic`` (reasoning-gym): three steps of drafting
in a row, on its own output, against the model's distribution.  For other problems it then drafts ``k`` tokens at every
step; those count that were sampled.  Last, an engine answers some of them with and without drafts, in turns.  It is a
small head with little to learn from: what is trained on a thousand times the text gives more.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import _bench
import drafts
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from safetensors.torch import save_file
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from sglang_pat.rank.draft_model import WINDOW, DraftModel, Pairs, read_config
from sglang_pat.speculate.drafter import count_right
from sglang_pat.testing import models
from sglang_pat.testing.server import Server
from sglang_pat.testing.smollm2 import load_transformers

SIZES = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "intermediate_size": 1536}
VOCABULARY = 4096
"""Tokens that the head may draft: the most frequent ones of the responses."""
IN_A_ROW = 3
"""Drafts that are learnt in a row."""
BATCH = 8
"""Responses of a step of training."""
RESPONSES = 4
"""Number of responses to each problem that is learnt from, at each temperature."""
BEFORE_SWITCH = 64
STILL_KNOWN = (0, 16, 64, 128)
"""Numbers of tokens before a switch that the head still knows after it; an engine moves ``draft_model.KEPT``."""
HELD_OUT = 16
"""Problems that the head is tried with, of eight responses each."""


class Target:
    """The model for which the head is, and the layers whose inputs are features."""

    def __init__(self, folder: Path) -> None:
        self.model = load_transformers().AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.config = self.model.config
        layers = self.config.num_hidden_layers
        self._layers = 2, layers // 2, layers - 3  # as SGLang's

    @torch.no_grad()
    def read(self, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Features ``[tokens, 3 * hidden]``, and what goes into the output layer ``[tokens, hidden]``."""
        out = self.model.model(torch.tensor([tokens]), output_hidden_states=True)
        kept = [out.hidden_states[layer][0] for layer in self._layers]
        return torch.cat(kept, dim=-1), out.last_hidden_state[0]


class Head(torch.nn.Module):
    """The head while it learns: for whole responses at once.  Weights have the names of its checkpoint."""

    def __init__(self, target: Target, ids: torch.Tensor) -> None:
        super().__init__()
        about, hidden = target.config, target.config.hidden_size
        heads, kv_heads, width, inner = SIZES.values()
        self.ids, self._eps, self._width = ids, about.rms_norm_eps, width
        output = target.model.lm_head.weight[ids].detach().clone()
        shapes = {
            "fc": (hidden, 3 * hidden), "midlayer.self_attn.q_proj": (heads * width, 2 * hidden),
            "midlayer.self_attn.k_proj": (kv_heads * width, 2 * hidden),
            "midlayer.self_attn.v_proj": (kv_heads * width, 2 * hidden),
            "midlayer.self_attn.o_proj": (hidden, heads * width), "midlayer.mlp.gate_proj": (inner, hidden),
            "midlayer.mlp.up_proj": (inner, hidden), "midlayer.mlp.down_proj": (hidden, inner),
        }  # fmt: skip
        self.weights = torch.nn.ParameterDict(
            {name.replace(".", "/"): torch.randn(shape) / shape[1] ** 0.5 for name, shape in shapes.items()}
        )
        norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm")
        self.weights.update({name.replace(".", "/"): torch.ones(hidden) for name in norms})
        # What the model reads its next token from is a good beginning.
        self.weights.update({"norm": target.model.model.norm.weight.detach().clone(), "lm_head": output})
        self._rotary = LlamaRotaryEmbedding(about)

    def _get(self, name: str) -> torch.Tensor:
        return self.weights[name.replace(".", "/")]

    def _norm(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(rows, rows.shape[-1:], self._get(name), self._eps)

    def _project(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        projected = F.linear(rows, self._get(f"midlayer.self_attn.{name}_proj"))
        return projected.unflatten(-1, (-1, self._width)).transpose(1, 2)

    def _rotate(self, rows: torch.Tensor, shift: int) -> torch.Tensor:
        positions = torch.arange(shift, shift + rows.shape[2])[None]
        cos, sin = (each[:, None] for each in self._rotary(rows, positions))
        first, second = rows.chunk(2, dim=-1)
        return rows * cos + torch.cat([-second, first], dim=-1) * sin

    def forward(self, features: torch.Tensor, embedded: torch.Tensor) -> Iterator[torch.Tensor]:
        """Scores ``[batch, length - number, ids]`` of drafts, one number after another.

        Row ``t`` of draft ``number`` has seen features up to ``t`` and tokens up to ``t + 1 + number``.

        Args:
            features: ``[batch, length, 3 * hidden]``.
            embedded: of the tokens after them, ``[batch, length, hidden]``.
        """
        hidden, length = F.linear(features, self._get("fc")), features.shape[1]
        before: list[tuple[torch.Tensor, torch.Tensor]] = []
        groups = SIZES["num_attention_heads"] // SIZES["num_key_value_heads"]
        for number in range(IN_A_ROW):
            rows = length - number
            hidden = hidden[:, :rows]
            normed = (
                self._norm(embedded[:, number:], "midlayer.input_layernorm"),
                self._norm(hidden, "midlayer.hidden_norm"),
            )
            both = torch.cat(normed, dim=-1)
            query = self._rotate(self._project(both, "q"), number)
            key, value = (
                each.repeat_interleave(groups, dim=1)
                for each in (self._rotate(self._project(both, "k"), number), self._project(both, "v"))
            )
            before.append((key, value))
            # To all that was there when the drafts began, and to the drafts since then.
            begun = query @ before[0][0][:, :, :rows].transpose(-1, -2)
            begun = begun.masked_fill(torch.ones(rows, rows, dtype=torch.bool).triu(1), float("-inf"))
            since = [(query * one[:, :, :rows]).sum(-1, keepdim=True) for one, _ in before[1:]]
            shares = (torch.cat([begun, *since], dim=-1) / self._width**0.5).softmax(-1)
            out = shares[..., :rows] @ before[0][1][:, :, :rows]
            for at, (_, one) in enumerate(before[1:]):
                out = out + shares[..., rows + at, None] * one[:, :, :rows]
            out = out.transpose(1, 2).flatten(2)
            hidden = hidden + F.linear(out, self._get("midlayer.self_attn.o_proj"))
            normed = self._norm(hidden, "midlayer.post_attention_layernorm")
            gate, up = (F.linear(normed, self._get(f"midlayer.mlp.{name}_proj")) for name in ("gate", "up"))
            hidden = hidden + F.linear(F.silu(gate) * up, self._get("midlayer.mlp.down_proj"))
            yield F.linear(self._norm(hidden, "norm"), self._get("lm_head"))

    def save(self, folder: Path, about: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"{name.replace('/', '.')}.weight": value.detach() for name, value in self.weights.items()}
        tensors["d2t"] = self.ids - torch.arange(len(self.ids))
        save_file(tensors, folder / "model.safetensors")
        about |= SIZES | {"draft_vocab_size": len(self.ids), "num_hidden_layers": 1}
        (folder / "config.json").write_text(json.dumps(about | {"architectures": ["LlamaForCausalLMEagle3"]}))


def train(target: Target, groups: Sequence[drafts.Group], epochs: int, folder: Path) -> None:
    """Train a head on these responses and write it to ``folder``."""
    frequent = Counter(token for group in groups for one in group.responses for token in one)
    ids = torch.tensor(sorted(token for token, _ in frequent.most_common(VOCABULARY)))
    head, embed = Head(target, ids), target.model.model.embed_tokens.weight.detach()
    output = target.model.lm_head.weight.detach()[ids]
    texts = []
    for group in track(groups, "features"):
        for response in group.responses:
            tokens = [*group.prompt, *response]
            features, last = target.read(tokens)
            texts.append((tokens, len(group.prompt), features.to(torch.bfloat16), last.to(torch.bfloat16)))
    texts.sort(key=lambda text: len(text[0]))
    batches = [texts[at : at + BATCH] for at in range(0, len(texts), BATCH)]
    optimizer = torch.optim.AdamW(head.parameters(), lr=5e-4, betas=(0.9, 0.95), weight_decay=0)
    total = epochs * len(batches)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-4, total_steps=total, pct_start=0.05)
    generator = torch.Generator().manual_seed(46)
    for epoch in range(epochs):
        losses: list[list[float]] = []
        for at in track(torch.randperm(len(batches), generator=generator).tolist(), f"epoch {epoch + 1} of {epochs}"):
            batch = batches[at]
            length = max(len(tokens) for tokens, *_ in batch)

            def pad(rows: torch.Tensor, length: int = length) -> torch.Tensor:
                return F.pad(rows, (0, 0, 0, length - len(rows)))

            tokens = torch.stack([F.pad(torch.tensor(text[0]), (0, length - len(text[0]))) for text in batch])
            features, last = (torch.stack([pad(text[place]) for text in batch]) for place in (2, 3))
            # Row t predicts token t + 2, for which the model's distribution is that of row t + 1.
            places = torch.arange(length)[None]
            begins, ends = (
                torch.tensor(each)[:, None] for each in zip(*[(t[1], len(t[0])) for t in batch], strict=True)
            )
            counts = ((places + 1 >= begins) & (places + 1 < ends))[:, 1:]
            wanted = F.linear(last.float(), output).softmax(-1)[:, 1:]
            scores = head(features[:, :-1].float(), F.embedding(tokens[:, 1:], embed))
            parts = []
            for number, one in enumerate(scores):
                rows = counts[:, number:]
                parts.append(F.cross_entropy(one[rows], wanted[:, number:][rows]))
            loss = sum(0.8**number * part for number, part in enumerate(parts))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            losses.append([part.item() for part in parts])
        print(f"epoch {epoch + 1}: loss of each draft", *(f"{mean(each):.2f}" for each in zip(*losses, strict=True)))
    head.save(folder, target.config.to_dict())


@torch.no_grad()
def replay(
    target: Target, head: DraftModel, text: list[int], features: torch.Tensor, span: range, count: int, known: int = 0
) -> list[int]:
    """Right drafts of each step in which the tokens at ``span`` of ``text`` come about if the head drafts ``count``.

    Args:
        known: the head has learnt nothing before this token.
    """
    embed, right, at = target.model.model.embed_tokens, [], span.start
    head.forget(0)
    while at < span.stop:
        # The last token's features are not there yet: it is the one that the next step computes.
        places = torch.arange(max(known, at - 1 - WINDOW), at - 1)
        drafted: list[int] = []
        if len(places):
            pairs = torch.zeros_like(places), places, torch.tensor(text)[places + 1], features[places]
            head.learn(Pairs(*pairs, torch.tensor([len(places) - 1])), embed)
            drafted = head.draft(torch.tensor([0]), min(count, span.stop - at), embed)[0].tolist()
        known = max(known, at - 1)
        # A step gives one token more than drafts are right, and the last one needs no draft.
        right.append(count_right(drafted[: span.stop - at - 1], text[at:]))
        at += right[-1] + 1
    return right


def count_accepted(target: Target, folder: Path, groups: Sequence[drafts.Group]) -> list[dict[str, Any]]:
    """A row for each number of drafted tokens, for the responses of ``drafts.count_accepted``; and for the tokens after
    the first :data:`BEFORE_SWITCH`, as if there was a switch, after which the head knows the last of those before."""
    head = DraftModel(folder, read_config(folder), 1, torch.float32, "cpu")
    right: dict[tuple[str, int], list[int]] = {}
    for group in track(groups, "the head"):
        for response in sorted(group.responses, key=len)[-drafts.TAIL :]:
            text, begin = [*group.prompt, *response], len(group.prompt)
            features, _ = target.read(text)
            spans = {("the head", count): (range(begin, len(text)), count, 0) for count in drafts.LENGTHS}
            if len(response) >= 2 * BEFORE_SWITCH:
                switch = begin + BEFORE_SWITCH
                after = range(switch, switch + BEFORE_SWITCH)
                spans |= {("the head, later", 4): (after, 4, 0)}
                spans |= {(f"the head, {kept} tokens kept", 4): (after, 4, switch - 1 - kept) for kept in STILL_KNOWN}
            for what, span in spans.items():
                right.setdefault(what, []).extend(replay(target, head, text, features, *span))
    return [
        {"drafts from": name, "k": k, "tokens a step": mean(n + 1 for n in each), "right": mean(each) / k}
        for (name, k), each in right.items()
    ]


def time_engine(
    model: Path, ways: dict[str, list[str]], problems: Sequence[str], tokens: int, turns: int
) -> dict[str, list[dict[str, float]]]:
    """Seconds and tokens a step of each round: one response of ``tokens`` tokens to each problem, four at a time."""
    prompts = drafts.make_prompts(model, problems)
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(turns):
        for way, flags in ways.items():
            base = "--tp 1 --dp 2 --adaptive-tp --pat-policy off".split()
            with Server(model, *base, *flags, max_total_tokens=32768) as server:
                for at in range(0, len(prompts), 4):
                    bodies = [
                        {
                            "input_ids": prompt,
                            "sampling_params": {
                                "temperature": 0.7, "max_new_tokens": tokens, "ignore_eos": True,
                                "sampling_seed": at + i,
                            },
                        }
                        for i, prompt in enumerate(prompts[at : at + 4])
                    ]  # fmt: skip
                    begun = time.perf_counter()
                    answers = [answer["meta_info"] for answer in server.generate(bodies)]
                    seconds = time.perf_counter() - begun
                    if at:  # the first round is slow
                        right = sum(answer.get("spec_num_correct_drafts", 0) for answer in answers)
                        steps = len(answers) * (tokens - 1) - right
                        found[way].append({"seconds": seconds, "tokens a step": 1 + right / steps})
    return found


def main() -> int:
    parser = _bench.options(__doc__, "eight problems to learn from, eight to try; some seven minutes")
    parser.add_argument("--head", type=Path, metavar="FOLDER", help="of a head: train none")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[1.0, 0.7])
    parser.add_argument("--problems", type=int, default=40, help="to learn from (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=192, help="of a response at most (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=2, help="of each way (default: %(default)s)")
    args = parser.parse_args()
    held_out, groups = HELD_OUT, 8
    if args.quick:
        args.problems, held_out, groups, args.tokens, args.epochs, args.turns = 8, 8, 2, 48, 2, 1
        args.temperatures = args.temperatures[-1:]
    torch.set_num_threads(os.cpu_count() or 1)
    machine, folder = _bench.about(), models.make_smollm2(Path(".cache/models/smollm2"))
    problems = drafts.draw_problems(held_out + args.problems)
    target, head = Target(folder), args.head or Path(".cache/models/smollm2-head")
    if not args.head:
        learn = [
            group
            for temperature in (1.0, 0.7)
            for group in drafts.sample(folder, temperature, problems[held_out:], RESPONSES, args.tokens)
        ]
        train(target, learn, args.epochs, head)
    found: dict[str, Any] = {}
    for temperature in args.temperatures:
        others = drafts.sample(folder, temperature, problems[:held_out], groups, args.tokens)
        rows = [*count_accepted(target, head, others), *drafts.count_accepted(others, None, drafts.TAIL)]
        drafts.show(f"temperature {temperature}", rows)
        found[str(temperature)] = rows
        _bench.write(args.json, machine=machine, found=found)
    drafting = ["--pat-speculate", "4"]
    ways = {"off": [], "texts": drafting, "head and texts": [*drafting, "--pat-draft-model", str(head)]}
    found["engine"] = time_engine(folder, ways, problems[: held_out // 2 + 4], args.tokens, args.turns)
    _bench.write(args.json, machine=machine, found=found)
    table = Table("drafts", "tokens a step", "seconds", "times as fast", title="rounds of four responses at 0.7")
    for way, rounds in found["engine"].items():
        gains = [a["seconds"] / b["seconds"] for a, b in zip(found["engine"]["off"], rounds, strict=True)]
        table.add_row(
            way, f"{median(one['tokens a step'] for one in rounds):.2f}",
            f"{median(one['seconds'] for one in rounds):.1f}",
            f"{median(gains):.2f} ({min(gains):.2f} to {max(gains):.2f})",
        )  # fmt: skip
    Console(width=110).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
