"""Lets stock SGLang 0.5.12.post1 import and run on a machine without CUDA.

Standard library only, and nothing heavy is imported until somebody else imports it: each fix hangs on the
import of the one module that it concerns. The same file serves this process (:func:`install`) and, through
``_site/sitecustomize.py``, every Python that this process starts (:func:`install_for_children`).

| what is in the way | what the shim does |
| --- | --- |
| ``sgl_kernel`` has no CPU wheel, and SGLang imports it at once | a stub package; calling a name raises |
| torchvision's wheel is built for CUDA, its C library does not load | declares the two operators it misses |
| SGLang's CUDA-IPC patch of ``torch.multiprocessing`` breaks CPU tensors | not applied without CUDA |
| indices of prompt logprobs and routed experts are pinned, for which it takes a GPU | plain tensors without CUDA |
| the gate of a shared expert is a Triton kernel (0.5.23) | by torch without CUDA |
| SGLang takes the CPU path only if asked | sets ``SGLANG_USE_CPU_ENGINE=1`` unless it is set |
"""

import importlib.abc
import importlib.machinery
import os
import sys
import types
from pathlib import Path

CHILD_SITE_DIR = Path(__file__).resolve().parent / "_site"
"""Folder whose ``sitecustomize.py`` installs the shim at the start of a Python process."""

_MARK = "_sglang_pat_cpu_shim"  # on our finder; this file may be loaded twice, by sitecustomize and by us


def is_needed() -> bool:
    """True if the real ``sgl_kernel`` is not installed: SGLang cannot be imported without the shim."""
    # PathFinder, not importlib.util.find_spec: the latter would find our own stub once it is installed.
    return importlib.machinery.PathFinder.find_spec("sgl_kernel") is None


def is_installed() -> bool:
    """True if the shim is in place in this process."""
    return any(getattr(finder, _MARK, False) for finder in sys.meta_path)


def ensure(children: bool = False) -> None:
    """:func:`install` where it :func:`is_needed`; ``children``: in what this process starts, too."""
    if is_needed():
        install()
        if children:
            install_for_children()


def install() -> None:
    """Put the shim in place in this process; call it before the first ``import sglang``. Idempotent.

    Each fix still looks for itself whether it is wanted, so a real ``sgl_kernel``, a working torchvision and
    a CUDA torch are left alone.

    Raises RuntimeError if SGLang is already imported and the shim is not in place: SGLang has then chosen its
    platform and bound the functions that the shim replaces.
    """
    if is_installed():
        return
    if "sglang.srt.utils" in sys.modules:
        raise RuntimeError(
            "the CPU shim comes too late: sglang is imported already; call sglang_pat.cpu.shim.ensure() before"
        )
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    sys.meta_path.insert(0, _Finder(stub_kernel=is_needed()))


def find_torchvision(name, path, target):
    """The module ``torchvision.extension``, with the operators that it misses.

    ``make setup`` has every Python of its environment ask this (``torchvision_on_cpu.pth``): there transformers can be
    imported without the rest of the shim.
    """
    spec = importlib.machinery.PathFinder.find_spec(name, path, target)
    if spec is not None:
        spec.loader = _ThenFix(spec.loader, _declare_torchvision_ops)
    return spec


def install_for_children() -> None:
    """Make every Python process started from now on install the shim, by way of ``PYTHONPATH``. Idempotent.

    This reaches processes whose start is not ours to change, such as SGLang's detokenizer. A child started
    with ``-I`` or ``-E`` ignores ``PYTHONPATH`` and is not reached.
    """
    ours = str(CHILD_SITE_DIR)
    entries = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != ours]
    os.environ["PYTHONPATH"] = os.pathsep.join([ours, *entries])


class _StubModule(types.ModuleType):
    """A module of which every attribute is a function that raises RuntimeError with its own full name."""

    __version__ = "0.0.0+cpu.stub"
    __path__: list[str] = []  # a package, so that `import sgl_kernel.x` asks our finder

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)  # inspect, copy, doctest and others probe for dunders
        full_name = f"{self.__name__}.{name}"

        def not_on_cpu(*args, **kwargs):
            raise RuntimeError(f"{full_name} was called, but sgl_kernel is not installed: it has no CPU build")

        not_on_cpu.__name__ = not_on_cpu.__qualname__ = name
        setattr(self, name, not_on_cpu)
        return not_on_cpu


def _declare_torchvision_ops(extension: types.ModuleType) -> None:
    """Declare the operators for which torchvision registers fakes, if its C library did not load."""
    if extension._has_ops() or hasattr(extension, "_sglang_pat_library"):
        return
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    extension._sglang_pat_library = library  # the declaration lives as long as this object


def _keep_cpu_reductions(patch_torch: types.ModuleType) -> None:
    """Make SGLang's CUDA-IPC patch a no-op without CUDA: it writes to field 6, and CPU tensors have 3.

    torch's sharing strategy stays as it is. With the default, "file_descriptor", weight updates from tensor
    work within the engine's process tree, and a killed process leaves nothing in shared memory. Descriptors
    pass only between processes with one multiprocessing authkey, so a sender from another tree (a Ray actor,
    an HTTP client) has to choose "file_system" itself: the receiver follows what the sender wrote.
    """
    import torch

    if not torch.cuda.is_available():
        patch_torch.monkey_patch_torch_reductions = lambda: None


class _TorchWithoutPinning(types.ModuleType):
    """torch, but ``tensor`` and ``zeros`` do not pin memory."""

    def __init__(self, torch: types.ModuleType):
        super().__init__(torch.__name__)
        self._torch = torch

    def __getattr__(self, name: str):
        return getattr(self.__dict__["_torch"], name)

    def tensor(self, *args, pin_memory=False, **kwargs):
        return self._torch.tensor(*args, **kwargs)

    def zeros(self, *args, pin_memory=False, **kwargs):
        return self._torch.zeros(*args, **kwargs)


def _pin_nothing(module: types.ModuleType) -> None:
    """Let ``pin_memory=True`` in ``module`` make a plain tensor, not an error, where there is no CUDA."""
    if not module.torch.cuda.is_available():
        module.torch = _TorchWithoutPinning(module.torch)


def _keep_tables_plain(base: types.ModuleType) -> None:
    """Let tables of routed experts be plain tensors where there is no CUDA; SGLang (0.5.23) registers them with it."""
    _pin_nothing(base)
    if not base.torch.cuda.is_available() and (makers := getattr(base, "ALLOC_MEMORY_FUNCS", None)) is not None:
        makers["cpu"] = lambda dims, dtype, **_: base.torch.empty(dims, dtype=dtype)


def _gate_by_torch(elementwise: types.ModuleType) -> None:
    """Have torch gate a shared expert where there is no CUDA; SGLang (0.5.23) launches a Triton kernel everywhere."""
    if elementwise.torch.cuda.is_available():
        return

    def multiply(hidden_states, gate_weight, shared_output):
        return (hidden_states @ gate_weight).sigmoid().unsqueeze(-1) * shared_output

    def multiply_and_add(hidden_states, gate_weight, shared_output, final_hidden_states):
        final_hidden_states += multiply(hidden_states, gate_weight, shared_output)

    elementwise.fused_gate_sigmoid_mul = multiply
    elementwise.fused_gate_sigmoid_mul_add = multiply_and_add


_AFTER_IMPORT = {
    "sglang.kernels.ops.elementwise.elementwise": _gate_by_torch,
    "torchvision.extension": _declare_torchvision_ops,  # the first thing that torchvision imports
    "sglang.srt.utils.patch_torch": _keep_cpu_reductions,
    "sglang.srt.layers.logits_processor": _pin_nothing,
    "sglang.srt.state_capturer.base": _keep_tables_plain,
}


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the stub of ``sgl_kernel``, and runs a fix after each module named in ``_AFTER_IMPORT``."""

    def __init__(self, stub_kernel: bool):
        self.stub_kernel = stub_kernel
        setattr(self, _MARK, True)

    def find_spec(self, name, path=None, target=None):
        if name == "sgl_kernel" or name.startswith("sgl_kernel."):
            # scalar_type stays missing: SGLang has a stand-in of its own, and uses it on ImportError
            if not self.stub_kernel or name == "sgl_kernel.scalar_type":
                return None
            return importlib.machinery.ModuleSpec(name, _StubLoader(), is_package=True)
        if name not in _AFTER_IMPORT:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                spec.loader = _ThenFix(spec.loader, _AFTER_IMPORT[name])
                return spec
        return None


class _StubLoader(importlib.abc.Loader):
    def create_module(self, spec):
        return _StubModule(spec.name)

    def exec_module(self, module):
        pass


class _ThenFix(importlib.abc.Loader):
    """A loader that runs the real one, then the fix."""

    def __init__(self, loader, fix):
        self.loader, self.fix = loader, fix

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        self.loader.exec_module(module)
        self.fix(module)

    def __getattr__(self, name):  # get_source and the like, for inspect and tracebacks
        if name == "loader":  # not set yet: unpickling or copying
            raise AttributeError(name)
        return getattr(self.loader, name)
