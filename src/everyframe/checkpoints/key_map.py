"""Key maps: rename a checkpoint's tensors to a module's names, as data. Imports no torch.

`strict_load.py` applies them. Maps of one family only are in its `checkpoint.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

#: Names in older files: diffusers renamed the attention of its autoencoders.
OLD_VAE_ATTENTION = (
    (r"(\.attentions\.\d+)\.query\.", r"\1.to_q."),
    (r"(\.attentions\.\d+)\.key\.", r"\1.to_k."),
    (r"(\.attentions\.\d+)\.value\.", r"\1.to_v."),
    (r"(\.attentions\.\d+)\.proj_attn\.", r"\1.to_out.0."),
)


@dataclass(frozen=True)
class KeyMap:
    """Mapping from tensor names of a checkpoint to those of a module.

    Attributes:
        rename: (regular expression, replacement), all applied in order with `re.sub`.
        ignore: regular expressions; a checkpoint tensor whose whole name matches one is skipped.
        tied: groups of module names that share one parameter. The checkpoint must hold at least one
            of each group; if it holds several, they must be equal.
    """

    rename: tuple[tuple[str, str], ...] = ()
    ignore: tuple[str, ...] = ()
    tied: tuple[tuple[str, ...], ...] = ()

    def target(self, name: str) -> str | None:
        """Module name for the checkpoint's `name`, or None if it is ignored."""
        if any(re.fullmatch(pattern, name) for pattern in self.ignore):
            return None
        for pattern, replacement in self.rename:
            name = re.sub(pattern, replacement, name)
        return name
