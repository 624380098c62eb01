"""The demonstration: a long-tailed batch on an engine that changes its layout, and on the same engine held in one.

    python -m sglang_pat.demo [--quick] [--out DIR]

``__main__`` (command line, what is printed and written) → ``contest`` (the layouts in turns) on the batch of ``cases``;
``picture`` draws it.  ``bench/rollout.py`` runs more cases with the same parts.
"""
