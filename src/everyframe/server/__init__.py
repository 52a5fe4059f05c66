"""The server: HTTP API, durable queue, dispatcher and web page. Imports no torch.

Read next: `process.py` (how its parts start and stop), `http/app.py`, `queue/store.py`,
`dispatch/dispatcher.py`.
"""
