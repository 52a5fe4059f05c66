"""How tensor names of a checkpoint map to a module's, as data. No torch.

Loading is `strict_load.py`; maps of one family alone stand in its `checkpoint.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

#: diffusers renamed the attention of its autoencoders; files from before have these names.
OLD_VAE_ATTENTION = (
    (r"(\.attentions\.\d+)\.query\.", r"\1.to_q."),
    (r"(\.attentions\.\d+)\.key\.", r"\1.to_k."),
    (r"(\.attentions\.\d+)\.value\.", r"\1.to_v."),
    (r"(\.attentions\.\d+)\.proj_attn\.", r"\1.to_out.0."),
)


@dataclass(frozen=True)
class KeyMap:
    """How a checkpoint's names become a module's.

    Attributes:
        rename: (regular expression, replacement), all applied in order with `re.sub`.
        ignore: regular expressions; a tensor whose name in the checkpoint matches one as a whole
            is not for this module.
        tied: groups of module names that are one parameter; the checkpoint must hold at least
            one of each group, and where it holds several they must be equal.
    """

    rename: tuple[tuple[str, str], ...] = ()
    ignore: tuple[str, ...] = ()
    tied: tuple[tuple[str, ...], ...] = ()

    def target(self, name: str) -> str | None:
        """The module's name for a checkpoint's `name`, or None where it is ignored."""
        if any(re.fullmatch(pattern, name) for pattern in self.ignore):
            return None
        for pattern, replacement in self.rename:
            name = re.sub(pattern, replacement, name)
        return name
