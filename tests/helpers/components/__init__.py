"""Files of single components: tiny modules, their original names, and storage formats."""
