"""Repair numerics: run modules in a wider dtype or with plain kernels, and remember which."""
