"""Run folders: the saved state of a run, from which an interrupted run resumes.

Read next: `folder.py` (layout and locking), `tensor_store.py` (tensors on disk), `run_state.py`
(when state is saved).
"""
