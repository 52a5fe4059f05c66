"""The HTTP application: access, routes, events and documents around the queue."""
