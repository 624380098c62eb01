#!/usr/bin/env bash
# Unpack loads of gpu/bundle.sh on the GPU machine: gpu/install.sh SITE LOAD... ; then PYTHONPATH=SITE:SITE/project/python:SITE/project
set -euo pipefail
site=$(mkdir -p "$1" && cd "$1" && pwd)
shift
for load in "$@"; do
  wheels=("$load"/*.whl)
  python3 -m pip --disable-pip-version-check install -q --no-index --no-deps --no-compile --target "$site" "${wheels[@]}"
  [ ! -f "$load/sgl_kernel_sm90.tgz" ] || tar xzf "$load/sgl_kernel_sm90.tgz" -C "$site"
  if [ -f "$load/sglang_pat.tgz" ]; then
    mkdir -p "$site/project"
    tar xzf "$load/sglang_pat.tgz" -C "$site/project"
    (cd "$site/project" && python3 setup.py -q build_ext --inplace)
  fi
done
