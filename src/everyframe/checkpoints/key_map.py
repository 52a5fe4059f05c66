"""Names of tensors that changed in diffusers itself, for the families that use its modules: data.

Loading is `everyframe.checkpoints.strict_load`; what is one family's alone is in its `weights.py`.
"""

from __future__ import annotations

#: diffusers renamed the attention of its autoencoders; files from before have these names.
OLD_VAE_ATTENTION = (
    (r"(\.attentions\.\d+)\.query\.", r"\1.to_q."),
    (r"(\.attentions\.\d+)\.key\.", r"\1.to_k."),
    (r"(\.attentions\.\d+)\.value\.", r"\1.to_v."),
    (r"(\.attentions\.\d+)\.proj_attn\.", r"\1.to_out.0."),
)
