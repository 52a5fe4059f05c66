"""LoRA and checkpoint formats of others, read strictly: each tensor is used or named in an error.

Key schemes are data (`key_schemes`, `name_maps`). A LoRA becomes patches on the tensors of a
checkpoint as they come from the file (`patches`), before any cast or quantization, so that every
way of loading gets them. Read next: `lora_file.py`, `patches.py`.
"""
