"""Around the call of a pipeline or of its modules: events, steps, saved answers, restored state."""
