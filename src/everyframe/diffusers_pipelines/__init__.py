"""Run any diffusers video pipeline through its own `__call__`, with plan, guard, resume and ranks.

Planning reads the index, configs and weight headers (`files/`, `inputs/`). A run makes the
pipeline's own call in a thread (`stage.py`, `calls/`), with hooks on its modules for the guard,
resume, CFG and sequence parallelism.
Read next: `family.py`, then `stage.py`.
"""
