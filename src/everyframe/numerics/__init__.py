"""Numerics: compare tensors, detect and locate non-finite values, trace runs and diff the traces.

Depends on no model family and never changes a result. Read next: `tensor_stats`, `trace`.
"""
