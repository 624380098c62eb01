"""The launch, until the first request: the command line, what is refused, the memory plan, the processes."""
