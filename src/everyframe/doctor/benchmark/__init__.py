"""Benchmark of a machine in a few minutes, in a form that can be shared and compared.

Each part runs in a process of its own, so that one that crashes is a line in the result. Read next:
`machine.py` runs the parts, `result.py` is the form, `comparison.py` compares two.
"""
