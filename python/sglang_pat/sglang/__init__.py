"""All code that imports, patches or reads SGLang.  Nothing outside of this package does.

By process: ``launch`` (before any), ``server``, ``coordinator.py``, ``rank``.  By purpose: ``switch`` (what a rank does
in one) and ``checks`` (of test builds).  Importing the package itself imports nothing.
"""
