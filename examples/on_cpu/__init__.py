"""What the examples and the tests of RL frameworks need on a machine without GPUs."""
