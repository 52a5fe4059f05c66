"""Linear layers whose weights stay in the blocks of their file (GGUF), widened for each product.

Values equal those of a weight widened on load, bit for bit; each product takes longer by the
widening. Blocks are widened on the CPU, by the file's arithmetic (`PackedRows.widen`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from everyframe.checkpoints.tensor_file import PackedRows
from everyframe.core.plan import PACKED

#: Elements widened at once, beside the widened weight itself.
_AT_ONCE = 1 << 20


class PackedLinear(nn.Module):
    """``x W^T + b`` with W in the blocks of its file.

    Attributes:
        weight: (out, bytes of a row) int8.
        weight_scale: empty, in the dtype that W is widened to.
        bias: (out) in that dtype, or None.
    """

    def __init__(self, rows: PackedRows, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self._widen = rows.widen
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = nn.Parameter(rows.codes, requires_grad=False)
        self.weight_scale = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
        self.bias = linear.bias

    def wide(self) -> Tensor:
        """W (out, in) in the dtype of the product."""
        shape = (self.out_features, self.in_features)
        values = torch.empty(shape, dtype=self.weight_scale.dtype, device="cpu")
        step = max(1, _AT_ONCE // self.in_features)
        for first in range(0, self.out_features, step):
            values[first : first + step] = self._widen(self.weight[first : first + step])
        return values

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        return F.linear(input, self.wide(), self.bias)

    def extra_repr(self) -> str:
        """Sizes, as `nn.Linear` shows them."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, kind={PACKED}"
