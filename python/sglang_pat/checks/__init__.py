"""Checks of test builds; none acts unless an environment variable asks for it."""
