"""A judge beside the actor: a plain engine that keeps part of its layers in host memory (RollPacker, 4.3).

``plan`` says which layers stay on the GPU, ``layers`` copies the others, ``residency`` and ``follow`` change that while
the engine runs, ``refusals`` says what cannot be, and ``attach`` gives SGLang's engines all of it.
"""

STREAM_VARIABLE = "SGLANG_PAT_STREAM_LAYERS"
"""Environment variable with the number of layers that plain engines stream from host memory, or ``auto``."""
