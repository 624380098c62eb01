"""The offline profiler (PAT section 4.2): what a step, a prefill and a switch take in each layout of one deployment.

    python -m profiler.sweep    --model-path M --tp 1 --dp 2 --out profile.json     measures
    python -m profiler.validate profile.json --model-path M --out DIR               checks the ratio of the layouts
    python -m profiler.report   profile.json --out DIR                              draws

``sweep`` goes over the points of ``grid`` → ``measure`` (one point, by ``windows`` of a trace) → ``rig`` (the engine
that ``launch`` started); ``store`` keeps the file.  ``worker`` runs an engine for acceptance and benches.  The file's
format is :mod:`sglang_pat.predict.profile`.
"""
