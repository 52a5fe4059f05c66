"""Resume a run: read what it saved, plan it anew where devices or memory differ, continue it."""
