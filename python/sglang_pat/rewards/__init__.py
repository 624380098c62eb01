"""Rewards of responses: each with a limit, so that none holds a step up.  Nothing of SGLang, Ray or verl is in here."""
