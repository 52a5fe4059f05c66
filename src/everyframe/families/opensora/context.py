"""What the blocks need of a text, computed once a prompt and then given to every step.

A context is a value: it belongs to the parameters that made it, is never changed, and gradients
flow through it. Not here: the text encoder (`text`) and the layers (`blocks`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from everyframe.core.errors import InputError
from everyframe.ops.attention import keys_with_a_place_to_look


class KeysValues(NamedTuple):
    """Keys and values of one cross-attention, each (B, heads, L, D)."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class TextContext:
    """Keys and values for each block in the order in which the blocks run, and their mask.

    `mask` is (B, 1, 1, L), True where there is a token, or None where every row is full.
    """

    blocks: tuple[KeysValues, ...]
    mask: Tensor | None

    @property
    def batch_size(self) -> int:
        return self.blocks[0].keys.shape[0]

    def rows(self, start: int, stop: int) -> TextContext:
        """The part that belongs to samples ``start:stop`` of the batch; nothing is copied."""
        return TextContext(
            tuple(KeysValues(k[start:stop], v[start:stop]) for k, v in self.blocks),
            None if self.mask is None else self.mask[start:stop],
        )


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
    mask, empty = tokens.mask, tokens.empty
    if mask is None or empty is None:
        return TextContext(tuple(blocks), None)
    if bool(empty.any()):
        nothing = empty[:, None, None, None]
        blocks = [KeysValues(k, torch.where(nothing, torch.zeros_like(v), v)) for k, v in blocks]
    return TextContext(tuple(blocks), mask[:, None, None])
