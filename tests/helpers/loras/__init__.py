"""LoRA files from random factors in every layout, and what merging them by hand gives."""
