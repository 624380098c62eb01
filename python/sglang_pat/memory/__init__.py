"""The memory plan: what a model weighs (``shapes``), and what each rank will hold (``plan``).  Without SGLang."""
