"""How what is shipped with the package was made. Not installed with it."""
