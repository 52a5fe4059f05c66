"""Benchmark a machine in a few minutes, with a result that can be shared and compared.

Each part runs in a process of its own, so a crash is a line in the result. Read next: `machine.py`
(runs the parts), `result.py` (the result), `comparison.py` (compares two results).
"""
