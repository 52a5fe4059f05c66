"""Resume a run: read what it saved, plan it again where devices or memory differ, continue it."""
