"""Test equipment: checkpoints made on the spot (see :mod:`sglang_pat.testing.models`)."""
