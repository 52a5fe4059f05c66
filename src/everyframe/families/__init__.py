"""Our own models, a folder each, and the registry that names them."""
