"""Runs a plan: stages one after the other, every step an event.

Read next: `run.py` (the loop), `engine/provenance.py` (what it takes to make a video again).
"""
