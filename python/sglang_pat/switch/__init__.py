"""A switch between two layouts: its states, its plan, and how a rank carries it out (``executor.py``, in order)."""
