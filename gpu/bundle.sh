#!/usr/bin/env bash
# What a GPU machine without a network needs to run the acceptance, as one load of some 55 MB.
#
#   gpu/bundle.sh LOAD.tar.xz [SGLANG]    here, where there is a package registry; SGLANG: 0.5.12.post1 or 0.5.23
#   gpu/install.sh SITE LOAD.tar.xz       there
#
# For a machine with Python 3.12, torch 2.11 (for 0.5.23: 2.14, whose symbols its kernel library wants; not tried yet),
# CUDA 13, a C++ compiler and one kind of GPU: Hopper (sm90).  The load has
# SGLang, its kernel library without FlashAttention 3 and without other chips, this project, and what they import.
# Versions are those of requirements/, unless one is named here.  Left out, as too large: grammar back ends (run with
# --grammar-backend none), FA3 (--attention-backend triton or flashinfer) and SmolLM2 (the acceptance leaves its step
# out and says so).
set -euo pipefail
usage="usage: gpu/bundle.sh LOAD.tar.xz [0.5.12.post1 | 0.5.23]"
[ $# = 1 ] || [ $# = 2 ] || { echo "$usage"; exit 2; }
case ${2:-0.5.12.post1} in
  0.5.12.post1)
    requirements=sglang-0.5.12.post1.txt
    versions=(sglang==0.5.12.post1 sglang-kernel==0.4.2.post2 flashinfer-python==0.6.11.post1 apache-tvm-ffi==0.1.9
      quack-kernels)
    ;;
  0.5.23)
    requirements=sglang.txt
    versions=(sglang==0.5.23 sglang-kernel==0.4.10 flashinfer-python==0.7.2 apache-tvm-ffi==0.1.11 quack-kernels==0.6.5
      blobfile lxml pycryptodomex xxhash zstandard)
    ;;
  *) echo "SGLANG=$2: $usage"; exit 2 ;;
esac
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
load=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/wheels" "$work/site"

python=$(command -v "$root/.venv/bin/python" || command -v python3)
platforms=()
for glibc in 2_34 2_28 2_27 2_24 2_17; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)

# What both files name is taken as the version's own says.
grep -oE '^[A-Za-z0-9_.-]+==' "$root/requirements/$requirements" >"$work/named"
grep -viFf "$work/named" "$root/requirements/cpu.txt" >"$work/pins.txt"
cat "$root/requirements/$requirements" >>"$work/pins.txt"
for package in "${versions[@]}" torch_memory_saver \
  transformers tokenizers huggingface_hub fastapi starlette uvicorn uvloop orjson msgspec pyzmq setproctitle \
  interegular outlines outlines_core lark diskcache nest-asyncio airportsdata pycountry referencing jsonschema \
  jsonschema-specifications rpds-py partial_json_parser python-multipart pydantic pydantic_core annotated-types \
  typing-inspection openai anthropic httpx2 httpcore2 truststore opentelemetry-api jiter distro sniffio \
  docstring_parser dill gguf soundfile pybase64 compressed-tensors loguru watchfiles openai-harmony IPython \
  ipython-pygments-lexers traitlets decorator stack-data executing asttokens pure_eval prompt_toolkit wcwidth jedi \
  parso matplotlib-inline pexpect ptyprocess cffi pycparser einops cuda-tile py-spy; do
  echo "  $package"
  pins=(-c "$work/pins.txt")
  [[ $package != *==* ]] || pins=()
  "$python" -m pip --disable-pip-version-check download -q --no-deps --only-binary=:all: --python-version 3.12 \
    --implementation cp "${platforms[@]}" "${pins[@]}" -d "$work/wheels" "$package"
done

"$python" - "$work/wheels" "$work/site" <<'PY'
import glob, sys, zipfile

# Not needed on one Hopper GPU: kernels of other chips and of recurrent layers, what only images, videos or a server in
# Rust need, and copies.
left_out = (
    *(f"sgl_kernel/{part}" for part in ("sm100/", "flash_ops", "flashmla_ops", "infllm_ops")),
    "sglang/multimodal_gen/", "sglang/srt/rust_extensions/_",
    "pycountry/locales/", "zstandard/_cffi", "jedi/third_party/",
    "flashinfer/experimental/b12x/", "flashinfer/experimental/sm110_xqa/", "flashinfer/moe_ep/kernel_src/",
    "flashinfer/fused_moe/backends/cudnn_frost/artifacts/",
    *(f"flashinfer/data/cutlass/{part}/" for part in ("test", "examples", "docs", "media", "python")),
    *(f"flashinfer/data/csrc/{part}" for part in ("alphamoe", "blackwell", "cake_", "experimental/", "gdn/", "kda/")),
    "flashinfer/data/csrc/fused_moe/cake_",
)
for wheel in glob.glob(sys.argv[1] + "/*.whl"):
    with zipfile.ZipFile(wheel) as source:
        source.extractall(sys.argv[2], [name for name in source.namelist() if not name.startswith(left_out)])
PY
mkdir "$work/site/project"
(cd "$root" && git archive --format=tar HEAD) | tar x -C "$work/site/project"
tar c -C "$work/site" . | xz -9 -T0 >"$load"
size=$(du -m "$load" | cut -f1)
echo "$load: $size MB"
[ "$size" -le 60 ] || { echo "the load must have 60 MB at most"; exit 1; }
