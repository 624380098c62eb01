"""``python -m sglang_pat.acceptance``: does the engine work on this machine, and what does a switch cost here?

What to run before trusting it with a training job, and to attach to a report of something that does not work.
"""
