"""Traces: fingerprints of every module's tensors in a run, and the diff of two runs.

They find the cause of results that are right on one device and wrong on another. A trace is a table
of fingerprints, small enough to mail, and holds no code: nothing is unpickled. This package depends
on no model family; `everyframe.engine.tracing` traces a run. Read next: `fingerprint`, `recorder`,
`file`, `diff`, `replay`.
"""
