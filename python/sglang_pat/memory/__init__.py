"""The memory plan: what each rank will hold, computed from shapes before anything is allocated.

``shapes`` (what a model weighs), ``available`` (what the machine has free), ``plan`` (who gets what, refusals).
Neither the host nor torch is imported here; ``sglang_pat.host.memory`` feeds it and hands the result to SGLang.
"""
