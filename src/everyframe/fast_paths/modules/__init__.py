"""Modules that compute faster in place of plain ones: kernels in C, and results that stay."""
