"""Read what clients send: bodies, fields, pictures and models, as the options of a `Request`."""
