"""The run folder: what is left of a run that was broken off, so that it goes on where it stopped.

Read next: `folder.py` (where runs lie, and whose they are), `runs/tensor_store.py` (what is in
one), `runs/run_state.py` (when it is written).
"""
