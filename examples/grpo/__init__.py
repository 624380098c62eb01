"""GRPO on two cores, from a small model's warm-up to a picture of what it learnt: ``python -m examples.grpo``."""
