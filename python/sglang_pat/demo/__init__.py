"""The demonstration: one batch of chat prompts on a server that changes its layout, and on two that do not.

    python -m sglang_pat.demo [--quick] [--out DIR]

Three servers run one after the other on the same work: adaptive (tp1×dp2 until the batch has drained, then
tp2×dp1), and the same engine held in either layout. It ends with tables, ``timeline.png`` and ``demo.json``.

``cli`` (command line) → ``runs`` (a server and its run) → ``client`` (HTTP); ``display`` shows progress.
``records`` is what a run leaves behind; ``tables``, ``timeline`` + ``picture`` and ``report`` show it.
"""
