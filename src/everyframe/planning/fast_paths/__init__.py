"""Which fast paths a component uses here, which it doesn't, and why."""
