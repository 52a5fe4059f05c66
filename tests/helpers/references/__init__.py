"""Reference frames of each family, from its formulas written out or diffusers' own pipeline."""
