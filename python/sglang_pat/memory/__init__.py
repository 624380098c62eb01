"""The memory plan: what each rank will hold, computed from shapes before anything is allocated.

``shapes`` (what a model weighs), ``available`` (what the machine has free), ``demand`` (what is asked for), ``room``
(how many tokens fit), ``plan`` (who gets what), ``alternatives`` (what would fit instead).
Neither SGLang nor torch is imported here; ``sglang_pat.launch.memory`` feeds it and hands the result to SGLang.
"""
