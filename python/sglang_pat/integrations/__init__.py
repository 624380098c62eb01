"""RL frameworks that generate with the adaptive engine; each sub-package speaks one framework's interfaces."""

CALLS = 1 << 16
"""What the Ray actor of an engine handles at once.  Ray's 1,000 are for an actor of one replica.  This one stands for a
node, and an abort or a pause must not wait until some of its requests have ended."""
