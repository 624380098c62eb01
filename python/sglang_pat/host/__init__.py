"""Everything that reads, writes, overrides or imports SGLang's internals, by operation.

Other packages call these operations and import nothing of SGLang (``tests/unit/test_host.py`` says which do already).

- A rank: its group (``groups``), its model runner and what of it belongs to a layout (``runner``), layers (``layers``,
  ``experts``), its memory (``memory``), its process (``process``).
- Requests: their state (``requests``), their KV (``kv``) and the radix tree (``tree``), their grammars (``grammars``).
- The loop: what it holds and counts (``loop``), batches (``batches``), what goes out (``outputs``), and where SGLang's
  own steps are hooked (``scheduler``).
- The start: SGLang's arguments with ours (``arguments``), its launch code, of our engine (``engine``, ``attach`` where
  a framework calls it, ``plain`` without an engine of ours), what is overridden (``guard``), ranks that share a GPU
  (``sharing``), other processes (``child``), their end (``shutdown``).
- The server: the way of a request (``tokenizer``), control requests (``controls``), routes (``http``), an engine in a
  framework's actor (``inprocess``).
- Every attribute is written by ``assign``.  ``fixes``: what goes when SGLang is mended.

What another version of SGLang would change is in the modules' headers, as read in the source of 0.5.16 and 0.5.23.
"""
