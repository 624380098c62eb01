"""How a rank carries out a switch, in the order of ``executor.py``; what is decided is in ``sglang_pat.switch``."""
