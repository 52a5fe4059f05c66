"""Fast paths and their certificates: what may take the place of plain torch, once it was tried.

A path is used on a device after a process of its own ran it there without dying, its error was
inside the budget and it was faster; what is refused is refused with a reason. Read next:
`catalogue` (which paths there are), `certificate`, `certify` (how one is made), `choosing` (which
paths follow from them), `put_on` (how they get onto a module).
"""
