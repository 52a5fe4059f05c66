"""Checks on this machine, or on one made up, and a verdict in the end.

`diagnose` takes the facts once and gives a `Report`: a line a check, each with one of four marks,
the cause and what mends it. Probes try what facts can't tell, each in a process of its own.
Read next: `diagnose`, `checks`, `probes`, and `everyframe.hardware.known_issues` for the data.
"""
