"""LoRA files of random factors in every layout, and the weights of a manual merge."""
