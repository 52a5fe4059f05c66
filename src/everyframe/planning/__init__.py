"""Turn a request and the facts of a machine into a plan.

Read next: `resolve.py` (the one resolver), `find_model.py` (known models, and those on disk).
"""
