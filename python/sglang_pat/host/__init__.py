"""All code that imports, patches or reads the host, SGLang 0.5.12.post1.

Nothing outside this sub-package imports ``sglang``. Importing the package itself imports nothing.
"""
