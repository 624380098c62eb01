#!/usr/bin/env bash
# What a GPU machine without a network needs to run the acceptance, in two loads below 60 MB each.
#
#   gpu/bundle.sh OUT_A OUT_B       here, where there is a package registry
#   gpu/install.sh SITE LOAD...     there, once for each load as it arrives, or once for both
#
# For a machine with Python 3.12, torch 2.11 (CUDA 13), a C++ compiler and one kind of GPU: Hopper (sm90). A load has
# SGLang, its kernel library without FlashAttention 3 and without other chips, this project, and what they import.
# Versions are those of requirements/, unless one is named here. Left out, as too large: grammar back ends (run with
# --grammar-backend none), FA3 (--attention-backend triton or flashinfer) and SmolLM2 (the acceptance leaves its step
# out and says so).
set -euo pipefail
[ $# = 2 ] || { echo "usage: gpu/bundle.sh OUT_A OUT_B"; exit 2; }
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
a=$(mkdir -p "$1" && cd "$1" && pwd)
b=$(mkdir -p "$2" && cd "$2" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

python=$(command -v "$root/.venv/bin/python" || command -v python3)
platforms=()
for glibc in 2_34 2_28 2_27 2_24 2_17; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)

get() { # folder, packages...
  local folder=$1
  shift
  local package
  for package in "$@"; do
    echo "  $package"
    local pins=(-c "$root/requirements/cpu.txt" -c "$root/requirements/sglang.txt")
    [[ $package != *==* ]] || pins=()
    "$python" -m pip --disable-pip-version-check download -q --no-deps --only-binary=:all: --python-version 3.12 \
      --implementation cp "${platforms[@]}" "${pins[@]}" -d "$folder" "$package"
  done
}

echo "load A: $a"
(cd "$root" && git archive --format=tar HEAD | gzip -9 >"$a/sglang_pat.tgz")
get "$a" sglang==0.5.12.post1 flashinfer-python==0.6.11.post1 apache-tvm-ffi==0.1.9 torch_memory_saver
get "$work" sglang-kernel==0.4.2.post2
"$python" - "$work" "$a/sgl_kernel_sm90.tgz" <<'PY'
import glob, io, sys, tarfile, zipfile

left_out = ("sgl_kernel/sm100/", "sgl_kernel/flash_ops")
kept = ("sgl_kernel/", "sglang_kernel-", "sgl_kernel-")
(wheel,) = glob.glob(sys.argv[1] + "/*.whl")
with zipfile.ZipFile(wheel) as source, tarfile.open(sys.argv[2], "w:gz") as target:
    for item in source.infolist():
        if item.is_dir() or item.filename.startswith(left_out) or not item.filename.startswith(kept):
            continue
        info = tarfile.TarInfo(item.filename)
        info.size, info.mode = item.file_size, 0o755
        target.addfile(info, io.BytesIO(source.read(item)))
PY

echo "load B: $b"
get "$b" transformers tokenizers huggingface_hub fastapi starlette uvicorn uvloop orjson msgspec pyzmq setproctitle \
  interegular outlines outlines_core lark diskcache nest-asyncio airportsdata pycountry referencing jsonschema \
  jsonschema-specifications rpds-py partial_json_parser python-multipart pydantic pydantic_core annotated-types openai \
  anthropic jiter distro sniffio docstring_parser modelscope modelscope-hub dill gguf soundfile pybase64 \
  compressed-tensors loguru watchfiles openai-harmony IPython traitlets decorator stack-data executing asttokens \
  pure_eval prompt_toolkit wcwidth jedi parso matplotlib-inline pexpect ptyprocess cffi pycparser einops quack-kernels

for load in "$a" "$b"; do
  size=$(du -sm "$load" | cut -f1)
  echo "$load: $size MB"
  [ "$size" -lt 60 ] || { echo "a load must stay below 60 MB"; exit 1; }
done
