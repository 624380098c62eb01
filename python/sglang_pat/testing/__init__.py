"""Test equipment: checkpoints made on the spot (:mod:`sglang_pat.testing.models`). Nothing here serves requests."""
