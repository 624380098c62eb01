"""KV pack and unpack against a plain copy of as many bytes on the same device, in turn.

    python bench/kv_kernels.py [--quick] [--json FILE]

On CUDA if there is a device, else on the CPU.  Shapes: one layer of Llama-3.1-8B (8 KV heads of 128, bfloat16) from tp1
to tp2, 4 and 8, and of SmolLM2's size in float32; slots in random order, as after many prefills and evictions.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from sglang_pat.acceptance.kernels import measure
from sglang_pat.tools.machine import machine

LAYERS = {
    "8 heads x 128, bfloat16": (8, 128, torch.bfloat16),
    "4 heads x 64, float32": (4, 64, torch.float32),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer shapes and repeats; seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    about = machine() | {"device": torch.cuda.get_device_name() if device == "cuda" else "cpu, one thread"}
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    table = Table(title="GB/s (bytes moved once; a copy reads and writes as many)", title_justify="left")
    for column in ("layer", "tokens", "parts", "pack", "unpack", "copy", "pack / copy", "unpack / copy"):
        table.add_column(column, justify="right")
    sizes = (1024,) if args.quick else (1024, 8192, 32768)
    results = []
    for name, (heads, dim, dtype) in LAYERS.items():
        for tokens in sizes:
            for parts in (1, 2, 4):
                row = measure(device, heads, dim, dtype, parts, tokens, 5 if args.quick else 20)
                results.append({"layer": name} | row)
                pack, unpack, copy = (row["bytes"] / row[f"{n}_seconds"] / 1e9 for n in ("pack", "unpack", "copy"))
                speeds = (f"{pack:.2f}", f"{unpack:.2f}", f"{copy:.2f}", f"{pack / copy:.2f}", f"{unpack / copy:.2f}")
                table.add_row(name, str(tokens), str(parts), *speeds)
    Console(width=120).print(table)
    if args.json:
        args.json.write_text(json.dumps({"machine": about, "results": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
