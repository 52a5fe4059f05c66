"""Dry run: run a call on meta tensors for memory, work and dtype errors, without device or weights.

Read next: `everyframe.dry_run.executor`.
"""
