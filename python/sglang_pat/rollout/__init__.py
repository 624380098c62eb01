"""Which prompts run in which round: tail batching (RollPacker section 3) and the two verl recipes, without a tail.

It runs in the process of whoever trains.  ``docs/architecture.md`` says which file does what.
"""
