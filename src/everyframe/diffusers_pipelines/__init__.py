"""Run any diffusers video pipeline through its own `__call__`, with plan, guard, resume and ranks.

Planning reads the index, configs and weight headers (`checkpoint`, `signature`, `defaults`,
`settings`, `components`). A run makes the pipeline's own call in a thread (`stage`,
`call_thread`), with hooks on its modules for the guard, resume, CFG and sequence parallelism.
Read next: `family.py`, then `stage.py`.
"""
