"""Command line: one file per command, which only parses and prints.

`main` dispatches commands and maps errors to one line and an exit code. `options` builds flags from
`Request` and the families' options. `parse_request` builds a `Request` from flags. `progress` shows
events, and `tables` formats results. `help_format` lays out help and words usage errors.

Read next: `main.py`, `generate.py`.
"""
