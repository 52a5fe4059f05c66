"""Text context: cross-attention keys and values, computed once a prompt and used in every step.

A context is a value: it belongs to the parameters that made it and never changes. Gradients flow
through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class KeysValues(NamedTuple):
    """Keys and values of one cross-attention, each (B, heads, L, D)."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class TextContext:
    """Keys and values of each block, in the order in which the blocks run, and their mask.

    `mask` is (B, 1, 1, L), True for a token; None if every row is full.
    """

    blocks: tuple[KeysValues, ...]
    mask: Tensor | None

    @property
    def batch_size(self) -> int:
        return self.blocks[0].keys.shape[0]

    def rows(self, start: int, stop: int) -> TextContext:
        """Context of samples ``start:stop`` of the batch; copies nothing."""
        return TextContext(
            tuple(KeysValues(k[start:stop], v[start:stop]) for k, v in self.blocks),
            None if self.mask is None else self.mask[start:stop],
        )


def context_of(
    blocks: Sequence[KeysValues], mask_BL: Tensor | None, empty_B: Tensor | None
) -> TextContext:
    """Build the context from the keys and values of each block.

    `mask_BL` is True for a token. Attention needs one visible key, so rows that `empty_B` marks as
    empty have one too; they attend to zero. None: every row is full.
    """
    if mask_BL is None or empty_B is None:
        return TextContext(tuple(blocks), None)
    if bool(empty_B.any()):
        nothing = empty_B[:, None, None, None]
        blocks = [KeysValues(k, torch.where(nothing, torch.zeros_like(v), v)) for k, v in blocks]
    return TextContext(tuple(blocks), mask_BL[:, None, None])


@dataclass(frozen=True)
class JointTextContext:
    """Text of models whose attention is over text and picture together.

    `text` (B, L, C) are the first states of the text's own residual stream, `vector` (B, C) is what
    the text adds to the modulation of every block.
    """

    text: Tensor
    vector: Tensor

    @property
    def batch_size(self) -> int:
        return self.text.shape[0]

    def rows(self, start: int, stop: int) -> JointTextContext:
        """Context of samples ``start:stop`` of the batch; copies nothing."""
        return JointTextContext(self.text[start:stop], self.vector[start:stop])
