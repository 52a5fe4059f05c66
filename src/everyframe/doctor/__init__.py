"""Diagnose this machine or a machine profile: checks with causes and fixes, and a verdict.

`diagnose` collects the facts once and returns a `Report`: one line per check with one of four
marks, the cause, and the fix. Probes test what facts can't show, each in its own process.

Read next: `diagnose`, `checks`, `probes`, and `everyframe.hardware.known_issues` for the data.
"""
