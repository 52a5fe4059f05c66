"""Do with less memory: offloaded and sharded weights, and what a run does when it runs out."""
