"""Builds the C++ extension ``sglang_pat._C``; everything else about the packages is in pyproject.toml.

``pip install --no-build-isolation -e .``, or ``python setup.py build_ext --inplace`` to build only. On an x86
machine with AVX2 and F16C the extension uses them and will need them; ``SGLANG_PAT_PORTABLE=1`` builds
without.
"""

import os
import platform
from pathlib import Path

from setuptools import find_packages, setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

ROOT = Path(__file__).parent


def cpu_flags() -> list[str]:
    """Compiler flags for the vector units of the building machine, or none."""
    if os.environ.get("SGLANG_PAT_PORTABLE") == "1" or platform.machine() != "x86_64":
        return []
    try:
        words = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return []
    return ["-mavx2", "-mf16c"] if {"avx2", "f16c"} <= set(words) else []


setup(
    packages=find_packages("python", include=["sglang_pat*", "reward_sandbox", "stream_layers"])
    + find_packages(".", include=["profiler*"]),
    package_dir={"": "python", "profiler": "profiler"},
    package_data={
        "sglang_pat.host": ["*/contract.txt", "*/attributes.txt"],
        "sglang_pat.cpu": ["_site/*.py"],
    },
    ext_modules=[
        CppExtension(
            "sglang_pat._C",
            sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").glob("*.cpp")),
            depends=sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").glob("*.h")),
            extra_compile_args=[
                "-O3",
                "-g0",
                "-fvisibility=hidden",
                "-Wall",
                "-Wno-unknown-pragmas",
                *cpu_flags(),
            ],
            extra_link_args=["-lrt"],
        )
    ],
    cmdclass={"build_ext": BuildExtension},
)
