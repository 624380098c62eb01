#!/usr/bin/env bash
# Unpack a load of gpu/bundle.sh on the GPU machine, and say what is missing there.
set -euo pipefail
[ $# = 2 ] || { echo "usage: gpu/install.sh SITE LOAD.tar.xz; then PATH=SITE/bin:\$PATH PYTHONPATH=SITE:SITE/project/python:SITE/project"; exit 2; }
site=$(mkdir -p "$1" && cd "$1" && pwd)
tar xJf "$2" -C "$site"
python3 -m compileall -q -j 0 "$site" || true  # else each process compiles; some files are of another Python
# SGLang's watchdog asks it for the stacks of a rank that hangs.
mkdir -p "$site/bin" && cp "$site"/py_spy-*.data/scripts/py-spy "$site/bin" && chmod +x "$site/bin/py-spy"
(cd "$site/project" && python3 setup.py -q build_ext --inplace)
PYTHONPATH=$site:$site/project/python:$site/project python3 -m sglang_pat.preflight
