"""What test builds look at; nothing here acts unless an environment variable asks for it."""
