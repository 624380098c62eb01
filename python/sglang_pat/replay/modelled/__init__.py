"""Profiles of machines that are not here, modelled from published numbers: for replays and tests, never for an engine.

``python -m sglang_pat.replay.modelled.reference --out profiles`` writes them.
"""
