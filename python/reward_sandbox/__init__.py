"""Rewards of programs: run in a sandbox, each with a time limit that is learnt (RollPacker, section 4.3).

``limits`` decides how long a test case may take, ``sandbox`` runs a program, ``programs`` makes a score of it.
``pool`` calls a reward function of any kind in processes, each call with a limit.  All of it needs Python alone.
"""
