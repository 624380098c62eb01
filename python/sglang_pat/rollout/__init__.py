"""Which prompts run in which round: tail batching (RollPacker section 3) and the two verl recipes, without a tail.

It runs in the process of whoever trains.  ``rules.py`` says what is wanted, ``records.py`` what there is.
``admitter.py`` decides: a state machine, pure, around ``state.py`` (what it remembers), ``active_round.py`` (a round
from its beginning to its end), ``launch_order.py`` (what starts next, in each mode), ``deadlines.py`` (who must be
returned when), ``redraws.py`` (which response set of a deferred prompt is kept) and ``estimates.py`` (what a job is
told of lengths and costs).  ``rounds.py`` drives an engine with it: ``requests.py``, ``turns.py``, ``loop.py``; a
server with ``client.py``.
"""
