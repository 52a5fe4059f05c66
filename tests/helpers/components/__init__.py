"""Files of single components: tiny modules, names of their authors, and forms that people store."""
