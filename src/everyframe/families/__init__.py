"""Model families: one folder each, with the same files in each as far as it needs them."""
