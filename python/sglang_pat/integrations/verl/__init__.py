"""verl's ``actor_rollout_ref.rollout.name=sglang_pat`` (verl 0.9.1).

| module | where it runs |
| --- | --- |
| ``plugin`` | in each process of verl's, when it imports verl: the names, the way of weights |
| ``options`` | wherever the job's configuration is read: what it says of this engine and of a step, checked |
| ``replica`` | in the Ray actor that holds an engine, and in the process that starts it |
| ``client`` | in each process that runs agent loops: asks for responses |
| ``fields`` | what a sample says of its tokens |
| ``trainers``, ``tail_batching`` | in the process of the trainer: what is logged; which prompts run in which step |
| ``streaming``, ``stream_lent`` | there, too: a step that trains on what is complete; on GPUs that the engines lend |
| ``gradient_sums`` | in each process of the trainer's GPUs: gradients of chunks |
| ``balancer`` | in a Ray actor: which engine gets the next request |
| ``fleet``, ``resize`` | in the process of the trainer: engines that die, come and go; the command that says how many |
"""
