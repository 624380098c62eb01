"""Replay a draining batch on a profile, with policies that decide and an oracle that knows.

``python -m sglang_pat.replay --profile P --lengths … --policies pat,survival,oracle`` compares; ``--log FILE`` takes
an engine's decisions again.
"""
