"""Which tensors upstream's checkpoints hold and what they are called here: data, no arithmetic.

The denoiser's and Step-LLM's have the modules' own names. Loading itself is
`everyframe.checkpoints.strict`. Read next: `checkpoint.py`, `family.py`.
"""

from __future__ import annotations

from everyframe.checkpoints.strict import KeyMap

DENOISER_KEYS = KeyMap()
LLM_KEYS = KeyMap()
#: A plain convolution in the file, a causal one (a level lower) in upstream's own module.
VAE_KEYS = KeyMap(rename=((r"^decoder\.conv_out\.(weight|bias)$", r"decoder.conv_out.conv.\1"),))
#: The file holds the picture half of CLIP as well, heads that nothing reads, and the table of
#: positions that transformers stored before 4.31; BERT's norms were once called gamma and beta.
CLIP_KEYS = KeyMap(
    rename=(
        (r"^(bert|text_model|text_encoder)\.", ""),
        (r"\.LayerNorm\.gamma$", ".LayerNorm.weight"),
        (r"\.LayerNorm\.beta$", ".LayerNorm.bias"),
    ),
    ignore=(
        r"visual\..*",
        r"logit_scale",
        r"(bert\.)?pooler\..*",
        r"(bert\.)?embeddings\.position_ids",
        r"(text_|visual_)?projection(\.weight)?",
        r"cls\..*",
    ),
)
KEYS = {
    "step_llm": LLM_KEYS,
    "clip": CLIP_KEYS,
    "denoiser": DENOISER_KEYS,
    "vae": VAE_KEYS,
}
