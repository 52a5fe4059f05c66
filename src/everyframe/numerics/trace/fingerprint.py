"""A tensor as two dozen numbers, out of which the difference of two tensors can still be told.

Least and largest value, mean, norm, and a *sketch*: the elements dealt out into `NUM_BUCKETS`
buckets and summed there with signs that are drawn for the shape (Charikar et al., "Finding frequent
items in data streams", 2002). The sketch of a difference is the difference of the sketches, and the
expected square of its norm is that of the difference itself: so a relative difference of 1e-6 is
seen as well as one of 1, to about a sixth of itself. Computed where the tensor is, in float32 at
least, without waiting for the device; the signs are the same on every device.
Read next: `recording`.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

#: A prime, so that no size of a dimension puts one channel into one bucket.
NUM_BUCKETS = 17
#: Before the sketch: least, largest, mean, norm.
LOW, HIGH, MEAN, NORM = range(4)
NUM_NUMBERS = 4 + NUM_BUCKETS

#: Elements of one bucket under one set of signs; later ones take it again with a sign of their own.
_RUN = 1024
#: So many elements are widened at once: what fits into a cache, and never a copy of it all.
_AT_ONCE = 64 * NUM_BUCKETS * _RUN
#: What stands for minus infinity in a mask of attention is this or less, and another number in
#: every dtype.
_MASKED = -9e3

_Numbers = npt.NDArray[np.float64]


def fingerprint(tensor: Tensor) -> Tensor:
    """The `NUM_NUMBERS` numbers of a tensor with elements, on its device; see the module.

    float64 for a float64 tensor, float32 for every other one.
    """
    with torch.no_grad():
        flat = _as_reals(tensor.detach()).reshape(-1)
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
    """Least, largest, sum, sum of squares and sketch of a stretch of elements."""
    low, high = torch.aminmax(part)
    missing = outer.shape[0] * inner.numel() - part.numel()
    padded = F.pad(part, (0, missing)) if missing else part
    sketch = ((padded.view(-1, *inner.shape) * inner).sum(-1) * outer).sum(0)
    return low, high, part.sum(), torch.dot(part, part), sketch


def difference(a: _Numbers, b: _Numbers) -> float:
    """The norm of the difference of two tensors over the larger norm, from their fingerprints.

    Infinite where one is finite and the other isn't; 0 where neither is. Masks of attention, whose
    "minus infinity" is another number in every dtype, count as equal.
    """
    if is_mask(a) and is_mask(b):
        return 0.0
    finite = [bool(np.isfinite(each[[LOW, HIGH]]).all()) for each in (a, b)]
    if not all(finite):
        return math.inf if any(finite) else 0.0
    size = max(float(a[NORM]), float(b[NORM]))
    apart = float(np.linalg.norm(a[4:].astype(np.float64) - b[4:].astype(np.float64)))
    if not (math.isfinite(size) and math.isfinite(apart)):
        # Squares beyond float32: the range is left to compare.
        size = float(max(np.abs(a[[LOW, HIGH]]).max(), np.abs(b[[LOW, HIGH]]).max()))
        apart = float(np.abs(a[[LOW, HIGH]] - b[[LOW, HIGH]]).max())
    return 0.0 if apart == 0 else apart / size if size else math.inf


def is_mask(numbers: _Numbers) -> bool:
    """Whether these are of a mask that is added to attention's logits: 0, or minus a lot."""
    return bool(numbers[HIGH] == 0 and numbers[LOW] <= _MASKED)


def is_finite(numbers: _Numbers) -> bool:
    """Whether all elements were numbers and none infinite."""
    return bool(np.isfinite(numbers[[LOW, HIGH]]).all())


def _as_reals(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


@lru_cache(maxsize=256)
def _signs(
    shape: tuple[int, ...], num_elements: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor]:
    """Signs within a block (buckets, run), and of each block's buckets (blocks, buckets)."""
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
