"""Trials of fast paths on the sizes of a component, in processes of their own."""
