"""What a component needs while it runs: loading, guard, repairs, memory fallbacks, offload."""
