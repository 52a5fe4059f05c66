"""Frames of each family by other means: its formulas written out, or diffusers' own pipeline."""
