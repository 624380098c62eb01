"""What the profiler measured, and what follows from it: step times, prefill times, the cost of a switch."""
