"""Run a plan: load and execute its stages in order and yield every step as an event.

Read next: `run.py` (the main loop), `records/provenance.py` (what reproduces a video), `workers/`.
"""
