"""Open-Sora 1.0 and 1.2: sizes, models, autoencoders, text, weights, and the family itself."""
