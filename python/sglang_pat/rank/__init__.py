"""A rank's process: SGLang's scheduler and model runner, on one layout at a time (``layouts.Layouts``)."""
