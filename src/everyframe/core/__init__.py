"""Core types: frozen requests, plans, facts, events and errors. Imports no torch.

Read next: `request` (what was asked), `plan` (what will run), `events` (progress of a run),
`errors` (errors and their exit codes).
"""
