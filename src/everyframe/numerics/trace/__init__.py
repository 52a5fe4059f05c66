"""What every module computed in a run, small enough to mail, and what is different in another run.

For "right on this card, wrong on that one". A trace is a table of fingerprints, never a program:
nothing in it is unpickled. Knows no family; `everyframe.engine.tracing` traces a run of one.
Read next: `fingerprint`, `recording`, `file`, `diff`, `replay`.
"""
