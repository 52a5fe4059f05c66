"""A pipeline's files: its index, the classes it names, and the tensors of its components."""
