"""Parse clients' requests: bodies, fields, pictures and models become options of a `Request`."""
