"""Speculation: which tokens are drafted for a request, and how many.

How drafts are checked is in ``host/verify.py``, and when in ``rank/speculation.py``.
"""
