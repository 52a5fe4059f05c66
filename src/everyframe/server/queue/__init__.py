"""The durable queue: jobs and their events in one SQLite file."""
