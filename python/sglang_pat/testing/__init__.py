"""Checkpoints made on the spot (:mod:`~sglang_pat.testing.models`), and servers that start quickly
(:mod:`~sglang_pat.testing.prefork`): for tests and benches, and also for the demo, the acceptance and the profiler."""
