"""The ground floor: frozen data and errors that every room speaks in. No torch here.

Read next: `request` (what was asked), `plan` (what will run), `events` (what happens meanwhile),
`video` (what comes out), `errors` (what can go wrong, and the exit code of each).
"""
