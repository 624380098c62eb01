"""The memory plan: what each rank will hold, computed from shapes before anything is allocated.

``shapes``: what a model weighs; ``machine``: what is free; ``plan``: who gets what, and what would fit instead.
Neither SGLang nor torch is imported here; ``sglang_pat.launch.spec`` asks for the plan, and hands it to SGLang.
"""
