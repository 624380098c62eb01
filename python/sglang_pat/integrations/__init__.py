"""RL frameworks that generate with the adaptive engine; each sub-package speaks one framework's interfaces."""
