"""The command line: one file a command, which parses and prints and does nothing else.

`main` finds the command and turns every error into one line and an exit code. `options` composes
the flags out of `Request` and the families' own options, `usage` words the errors of parsing,
`asking` makes a `Request` of the flags, `progress` shows what happens, `sink` lets frames flow into
files, `tables` and `text` lay out what is printed. Read next: `main.py`, `generate.py`.
"""
