"""LoRA files and other programs' checkpoints, read strictly: each tensor is used or is an error.

Key schemes are data (`key_schemes`, `name_maps`). A LoRA becomes patches (`patches`) that apply to
a checkpoint's tensors as they are read, before any cast or quantization, so every way of loading
gets patched tensors. Read next: `lora_file.py`, `patches.py`.
"""
