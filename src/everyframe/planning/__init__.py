"""From what was asked and the facts of the machine to what will run.

Read next: `resolve.py` (the one resolver), `planning/find_model.py` (what is known and on disk).
"""
