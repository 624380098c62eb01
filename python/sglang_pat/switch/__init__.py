"""A switch between two layouts: its states, its plan and its execution."""
