"""OpenRLHF 0.11.2 with this engine: ``python -m sglang_pat.integrations.openrlhf …its own arguments…``.

| module | where it runs |
| --- | --- |
| ``__main__`` | in the driver: takes our arguments out, and starts OpenRLHF's command with the rest |
| ``facade`` | in every process, before OpenRLHF is imported: the few names of vLLM's that it imports |
| ``launcher`` | in the driver: where OpenRLHF makes its engine actors; in the trainer's process: what is logged |
| ``actor`` | in the Ray actor that holds an engine |
"""
