"""Which prompts run in which round: tail batching (RollPacker section 3) and the two verl recipes, without a tail.

``rules.py`` says what is wanted, ``records.py`` what there is, ``admitter.py`` decides (a state machine, pure),
``modes.py`` how a round is put together in each mode, ``planner.py`` in which layout it starts; ``rounds.py`` drives an
engine with it.
"""
