"""The server: HTTP API, durable queue, dispatcher and web page. Imports no torch."""
