"""Tensors and ranks: who has which part, and how parts come from one rank to another.

No model family and no plan here: `partition` (uneven shares), `grid` (tokens of videos dealt out by
places or by frames), `team` (ranks that work together), `switch` (from one way of dealing to the
other). Which model is cut where is told by its family's `sharding.py`.
"""
