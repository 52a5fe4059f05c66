"""A fault: the operation that made a non-finite value, and the module that it belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from everyframe.numerics.tensor_stats import Range

Cause = Literal["range", "kernel", "formula", "unclear", "compiled", "weights", "given"]


@dataclass(frozen=True)
class Fault:
    """An operation that made a non-finite value.

    `cause` is one of:
      ``range``: the float32 result is finite, but above the largest value of `dtype`;
      ``kernel``: the float32 result is finite and fits into `dtype`, so this kernel is wrong or
          accumulates too narrowly;
      ``formula``: the float32 result is not finite either;
      ``unclear``: the operation can't be repeated in float32;
      ``compiled``: the same block is finite without compilation;
      ``weights``: no operation; `module` names a tensor that is not finite itself;
      ``given``: no operation; `operation` names the non-finite input of the call.

    Attributes:
        part: component; empty outside of all components.
        module: dotted name, within the component, of the innermost module that ran; may be empty.
        operation: name of the operation.
        dtype: dtype of a cast's result, otherwise the narrowest floating dtype involved.
        given: range of the operands.
        made: range of the result.
        wide: range of the result in float32, or without compilation.
        is_planned: -inf was written on purpose, as in a mask, or memory was uninitialised. It
            counts as a fault only if there is no other.
    """

    part: str
    module: str
    operation: str
    cause: Cause
    dtype: torch.dtype
    given: Range
    made: Range
    wide: Range | None
    is_planned: bool = False

    @property
    def place(self) -> str:
        """Component and module, as one dotted name."""
        return ".".join(name for name in (self.part, self.module) if name) or "around the model"
