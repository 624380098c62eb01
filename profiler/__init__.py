"""The offline profiler (PAT section 4.2): what a step, a prefill and a switch take in each layout of one deployment.

    python -m profiler.sweep    --model-path M --tp 1 --dp 2 --out profile.json     measures
    python -m profiler.report   profile.json --out DIR                              draws
    python -m profiler.validate profile.json --model-path M                         compares with real decoding

``sweep`` → ``session`` (one engine, one pass over the grid) → ``measure`` (one point) → ``rig`` (the engine);
``grid`` says what could be measured, ``budget`` what there is time for, ``windows`` turns a trace of scheduler steps
into step times, ``store`` keeps the file.  ``report`` → ``figures``, ``maps``, ``accuracy``, ``page``; ``validate`` →
``trajectory``.  The file's format is :mod:`sglang_pat.predict.profile`.
"""
