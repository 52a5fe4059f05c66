"""How the embedded model `shapes` is made: its world, training, evaluation. Start at README.md."""
