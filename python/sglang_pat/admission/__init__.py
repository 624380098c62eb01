"""Which prompts run in which round: tail batching (RollPacker section 3) and the two verl recipes, without a tail.

``rules.py`` says what is wanted, ``records.py`` what there is, ``admitter.py`` decides (a state machine, pure), with a
file for each part of a round's life: ``epochs.py`` (prompts come in), ``opening.py``, ``under_way.py``, ``ending.py``;
``deadlines.py`` says who must be returned when, ``redraws.py`` which response set of a deferred prompt is kept.
``state.py`` is what it remembers, ``saved.py`` that in a file, ``bias.py`` how much shorter than drawn what is returned
is.  ``modes.py`` says how a round is put together in each mode, ``planner.py`` in which layout it starts;
``rounds.py`` drives an engine with it.
"""
