"""Checkpoints: locate, download, verify and strictly load them. No model code.

Modules import torch only where tensors are read, so listing and planning stay fast.

Read next: `model_zoo` (models with a short name), `locate` (what a name means and what of it is on
disk), `download` (the only module that uses the network), `safetensors_header` (facts of a file
without torch), `tensor_file` (one tensor at a time), `strict_load` (into a module, nothing missing
and nothing left over), `digest` (the hash in the provenance record).
"""
