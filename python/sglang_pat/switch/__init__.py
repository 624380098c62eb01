"""A switch between two layouts: its states, its plan and the order of outputs.

Ranks carry it out in ``sglang/switch/executor.py``.
"""
