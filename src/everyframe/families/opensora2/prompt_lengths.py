"""Number of tokens that each text encoder of Open-Sora 2.0 reads. No torch here."""

from __future__ import annotations

#: Texts are padded to it, and the padding is read.
T5_LENGTH, CLIP_LENGTH = 512, 77
