"""Recipes of the models that are shipped with the package. Not installed with it."""
