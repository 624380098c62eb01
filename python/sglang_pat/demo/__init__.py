"""The demonstration: long-tailed batches on an engine that changes its layout, and on the same engine held in one.

    python -m sglang_pat.demo [--quick] [--out DIR]

``cli`` (command line) → ``contest`` (both engines, in turns) on the ``cases``; ``display`` shows progress.  ``records``
is what a case leaves behind; ``verdict`` says what it means; ``tables``, ``timeline`` + ``picture`` and ``report`` show
it.  ``bench/rollout.py`` runs more cases with the same parts.
"""
