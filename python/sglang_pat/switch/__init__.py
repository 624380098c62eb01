"""A switch between two layouts: its states, its plan and the order of outputs.  ``host/switch.py`` carries it out."""
