"""Texts as the denoisers take them: checked, and cut to what the longest row of a batch uses.

Not here: what the blocks then keep of them (`everyframe.families.text_context`), the text encoder
(`text`) and the layers (`blocks`).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from everyframe.core.errors import InputError
from everyframe.families.text_context import KeysValues, TextContext, context_of
from everyframe.ops.attention import keys_with_a_place_to_look


class Tokens(NamedTuple):
    """Texts cut to the longest of the batch.

    `mask` says what attention may look at, `empty` (B,) which rows are without any token; both
    are None where every row is full.
    """

    text: Tensor
    mask: Tensor | None
    empty: Tensor | None


def cut_to_longest(text: Tensor, mask: Tensor | None, caption_channels: int) -> Tokens:
    """`text` (B, L, channels) or (B, 1, L, channels) without the columns that no row uses.

    `mask` is (B, L), true or 1 for a token; None stands for tokens everywhere. Raises `InputError`
    for shapes that don't belong together.
    """
    if text.ndim == 4 and text.shape[1] == 1:  # upstream's layout
        text = text.squeeze(1)
    if text.ndim != 3 or text.shape[-1] != caption_channels:
        raise InputError(
            f"text must be (batch, tokens, {caption_channels}), got {tuple(text.shape)}"
        )
    if mask is None:
        return Tokens(text, None, None)
    if mask.shape != text.shape[:2]:
        raise InputError(
            f"the text's mask must be {tuple(text.shape[:2])} as the text is, "
            f"got {tuple(mask.shape)}"
        )
    mask = mask.bool()
    used = mask.any(dim=0).nonzero()
    # One column is kept for a batch of empty texts, as attention needs something to look at.
    length = int(used[-1]) + 1 if len(used) else 1
    text, mask = text[:, :length], mask[:, :length]
    if bool(mask.all()):
        return Tokens(text, None, None)
    mask = mask.to(text.device)
    return Tokens(text, keys_with_a_place_to_look(mask), ~mask.any(dim=1))


def build_context(tokens: Tokens, blocks: list[KeysValues]) -> TextContext:
    """The context of projected `tokens`; rows without a token attend to zero."""
    return context_of(blocks, tokens.mask, tokens.empty)
