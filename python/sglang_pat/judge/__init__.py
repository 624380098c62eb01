"""A judge beside the actor: a plain engine that keeps part of its layers in host memory (RollPacker, 4.3)."""
