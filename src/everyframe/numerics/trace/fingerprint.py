"""Fingerprint: a tensor as 21 numbers, from which the difference of two tensors can be estimated.

The numbers are minimum, maximum, mean, norm, and a *sketch* (count sketch): elements are dealt into
`NUM_BUCKETS` buckets and summed with random signs that depend on the shape (Charikar et al.,
"Finding frequent items in data streams", 2002). The sketch of a difference is the difference of the
sketches, and its expected squared norm is that of the difference itself. So relative differences
from 1e-6 to 1 are seen, to about a sixth of their size. Computed on the tensor's device in float32
at least, without synchronisation; signs are the same on every device.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

#: A prime, so that no dimension's size maps one channel to one bucket.
NUM_BUCKETS = 17
#: Indices of the numbers before the sketch: minimum, maximum, mean, norm.
LOW, HIGH, MEAN, NORM = range(4)
NUM_NUMBERS = 4 + NUM_BUCKETS

#: Elements of one bucket under one set of signs; later runs reuse them with a sign of their own.
_RUN = 1024
#: Elements widened at once: what fits into a cache, never a copy of the whole tensor.
_AT_ONCE = 64 * NUM_BUCKETS * _RUN
#: An attention mask's "minus infinity" is at most this, and differs between dtypes.
_MASKED = -9e3

_Numbers = npt.NDArray[np.float64]


def fingerprint(tensor: Tensor) -> Tensor:
    """Compute the `NUM_NUMBERS` numbers of a non-empty tensor, on its device.

    The result is float64 for a float64 tensor, float32 for every other one.
    """
    with torch.no_grad():
        reals = tensor.detach()
        flat = (torch.view_as_real(reals) if reals.is_complex() else reals).reshape(-1)
        wide = torch.float64 if flat.dtype == torch.float64 else torch.float32
        inner, outer = _signs(tuple(tensor.shape), flat.numel(), wide, str(flat.device))
        rows = max(1, _AT_ONCE // inner.numel())
        size = rows * inner.numel()
        pieces = [
            _sums(flat[place * size : (place + 1) * size].to(wide), inner, signs)
            for place, signs in enumerate(torch.split(outer, rows))
        ]
        if len(pieces) > 1:
            low, high, total, square, sketch = (
                torch.stack(each) for each in zip(*pieces, strict=True)
            )
            pieces = [(low.amin(), high.amax(), total.sum(), square.sum(), sketch.sum(0))]
        low, high, total, square, sketch = pieces[0]
        return torch.cat((torch.stack((low, high, total / flat.numel(), square.sqrt())), sketch))


def _sums(part: Tensor, inner: Tensor, outer: Tensor) -> tuple[Tensor, ...]:
    """Minimum, maximum, sum, sum of squares and sketch of a stretch of elements."""
    low, high = torch.aminmax(part)
    missing = outer.shape[0] * inner.numel() - part.numel()
    padded = F.pad(part, (0, missing)) if missing else part
    sketch = ((padded.view(-1, *inner.shape) * inner).sum(-1) * outer).sum(0)
    return low, high, part.sum(), torch.dot(part, part), sketch


def difference(a: _Numbers, b: _Numbers) -> float:
    """Estimate ``|a - b| / max(|a|, |b|)`` of two tensors from their fingerprints.

    Infinite if only one is finite; 0 if neither is. Attention masks, whose "minus infinity" differs
    between dtypes, count as equal.
    """
    if is_mask(a) and is_mask(b):
        return 0.0
    finite = [bool(np.isfinite(each[[LOW, HIGH]]).all()) for each in (a, b)]
    if not all(finite):
        return math.inf if any(finite) else 0.0
    size = max(float(a[NORM]), float(b[NORM]))
    distance = float(np.linalg.norm(a[4:].astype(np.float64) - b[4:].astype(np.float64)))
    if not (math.isfinite(size) and math.isfinite(distance)):
        # Squares overflow float32; only the range can be compared.
        size = float(max(np.abs(a[[LOW, HIGH]]).max(), np.abs(b[[LOW, HIGH]]).max()))
        distance = float(np.abs(a[[LOW, HIGH]] - b[[LOW, HIGH]]).max())
    return 0.0 if distance == 0 else distance / size if size else math.inf


def is_mask(numbers: _Numbers) -> bool:
    """Whether the fingerprint is of an additive attention mask: 0 or a large negative number."""
    return bool(numbers[HIGH] == 0 and numbers[LOW] <= _MASKED)


def is_finite(numbers: _Numbers) -> bool:
    """Whether all elements were finite."""
    return bool(np.isfinite(numbers[[LOW, HIGH]]).all())


@lru_cache(maxsize=256)
def _signs(
    shape: tuple[int, ...], num_elements: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor]:
    """Signs within a block (buckets, run), and one per block and bucket (blocks, buckets)."""
    run = min(_RUN, -(-num_elements // NUM_BUCKETS))
    num_blocks = -(-num_elements // (NUM_BUCKETS * run))
    # numpy keeps this generator's raw bits the same for good, on every machine.
    bits = np.random.PCG64(np.random.SeedSequence([NUM_BUCKETS, *shape]))

    def drawn(*size: int) -> Tensor:
        words = bits.random_raw(-(-math.prod(size) // 64)).astype("<u8")
        ones = np.unpackbits(words.view(np.uint8))[: math.prod(size)].reshape(size)
        return torch.from_numpy(ones).to(device, dtype) * 2 - 1

    with torch.inference_mode(False):
        return drawn(NUM_BUCKETS, run), drawn(num_blocks, NUM_BUCKETS)
