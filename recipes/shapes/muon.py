"""Muon (Jordan et al., 2024) for matrices, orthogonalised in float32.

A convolution's kernel counts as a matrix of output channels by input channels and positions.
PyTorch's own Muon multiplies in bf16, which takes longer than a whole training step on a CPU
without bf16 instructions. Matrices of one shape are orthogonalised together.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration, as the authors chose them
_ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised; steps as large as AdamW's (0.2 root mean square)."""

    def __init__(
        self, matrices: Iterable[Tensor], lr: float, weight_decay: float, momentum: float = 0.95
    ) -> None:
        options = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__(sorted(matrices, key=lambda matrix: tuple(matrix.shape)), options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            trained = [matrix for matrix in group["params"] if matrix.grad is not None]
            for shape, same in groupby(trained, key=lambda matrix: tuple(matrix.shape)):
                matrices = list(same)
                directions = torch.stack([self._direction(m, group["momentum"]) for m in matrices])
                step = group["lr"] * 0.2 * max(directions.shape[1:]) ** 0.5
                turned = orthogonal(directions).view(-1, *shape)
                torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(matrices, list(turned), alpha=-step)

    def _direction(self, matrix: Tensor, momentum: float) -> Tensor:
        kept = self.state[matrix].setdefault("momentum", torch.zeros_like(matrix))
        assert matrix.grad is not None
        kept.lerp_(matrix.grad, 1 - momentum)
        return matrix.grad.lerp(kept, momentum).flatten(1)


def orthogonal(matrices: Tensor) -> Tensor:
    """(N, rows, columns) -> the same with singular values near 1."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x
