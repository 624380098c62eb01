"""Decisions when to switch, and to what: pure functions of a snapshot and of the response lengths seen so far."""
