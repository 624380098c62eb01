"""Which part of a weight a rank holds at a degree, and how to get from one degree to another."""
