"""Our own models, one folder each, and the registry that names them."""
