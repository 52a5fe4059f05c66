"""Single files of components: tiny modules, their authors' names, and the forms that people store."""
