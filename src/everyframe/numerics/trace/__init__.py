"""Traces: fingerprints of every module's tensors in a run, and the diff of two runs.

For "right on this card, wrong on that one". A trace is small enough to mail and is a table of
fingerprints, never code: nothing in it is unpickled. This package depends on no model family;
`everyframe.engine.tracing` traces a run. Read next: `fingerprint`, `recorder`, `file`, `diff`,
`replay`.
"""
