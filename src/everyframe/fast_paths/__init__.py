"""Fast paths: attention kernels, dtypes, fusions and compilation, used only with a certificate.

A path is certified for a component on a device by a trial in a process of its own: it must not
crash, its error must be within the budget, and it must be faster. A refusal states its reason. Read
next: `registry.py` (all paths), `certificates.py` (data and store), `certification/` (making them),
`apply.py` (using them on a module).
"""
