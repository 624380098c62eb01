"""Which prompts run in which round: tail batching (RollPacker section 3) and the two verl recipes, without a tail.

``rules.py`` says what is wanted, ``records.py`` what there is, ``admitter.py`` decides (a state machine, pure), with a
file for each part of a round's life: ``epochs.py`` (prompts come in), ``opening.py``, ``under_way.py`` (on top of
``following.py``), ``ending.py``.  ``ready.py``, ``starting.py`` and ``deadlines.py`` say what is next and who must be
returned when, ``redraws.py`` which response set of a deferred prompt is kept.  ``modes.py`` says how a round is put
together in each mode.  ``state.py`` is what the admitter remembers,
``history.py`` that of earlier rounds, ``saved.py`` and ``job_files.py`` both in files; ``bias.py`` says how much
shorter than drawn what is returned is, ``cost.py`` what it costs.  ``rounds.py`` drives an engine (``backend.py``) with
it: ``requests.py``, ``turns.py``, ``callbacks.py``.
"""
