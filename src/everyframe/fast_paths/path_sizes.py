"""What fast paths and DeepCache need beside a dry run's memory, as functions of sizes. No torch.

A kernel in C has scratch while it computes: the formulas are upper bounds of what the sources in
`everyframe/ops/native/` allocate, whatever the width of the processor's vectors is, and
`tests/fast_paths/test_path_sizes.py` holds them to that. Others store tensors from step to step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod

from everyframe.core.facts import OpShape

#: Multiplications that take as long as to transform one weight, as measured.
_WEIGHT_COST = 1600
#: The same of a weight over time, which becomes 6 numbers and not 36.
_TIME_WEIGHT_COST = 60
#: Share of a convolution's multiplications that Winograd's may have. Its own are float32: oneDNN
#: computes two in bfloat16 in that time.
_MOST_PRODUCTS = {"float32": 0.9, "bfloat16": 0.45}
#: Most input channels in bfloat16: with 1280 it was as fast as oneDNN, with 2560 slower.
_MOST_CHANNELS = 640
#: Fewest channels of a convolution by Winograd's algorithm: fewer leave lanes of it empty.
FEWEST_CHANNELS = 32

#: Most numbers that rounding to registers and cache lines adds to a row or a plane.
_ROUNDING = 31


def saves_products(dtype: str, inputs: int, images: int, height: int, width: int) -> bool:
    """Whether tiles of 4x4, whole at the edges too, need fewer multiplications than pixels do.

    `inputs` are the input channels of all taps.
    """
    if dtype == "bfloat16" and inputs > _MOST_CHANNELS:
        return False
    tiles = images * -(-height // 4) * -(-width // 4)
    most = _MOST_PRODUCTS[dtype] * 9 * images * height * width
    return 36 * tiles + _WEIGHT_COST < most


def saves_products_over_time(frames: int, pixels: int) -> bool:
    """The same in float32 for tiles of four frames; `frames` are those of the result."""
    most = _MOST_PRODUCTS["float32"] * 3 * frames * pixels
    return 6 * -(-frames // 4) * pixels + _TIME_WEIGHT_COST < most


def winograd_bytes(inputs: int, outputs: int, tiles: int, num_threads: int, area: int = 36) -> int:
    """Scratch of `convolve` in ``winograd.c``: transformed weights, and tiles of each thread.

    A tile has `area` numbers a channel: 36 of an image, 6 over time.
    """
    block = min(max(2**20 // (area * inputs), 128), -(-outputs // 32) * 32)
    row = inputs + block + 2 * _ROUNDING
    rows = 28 if area * inputs * block <= 2**20 else 112
    numbers = min(max(3 * 2**16, area * row * rows), area * row * (tiles // num_threads + 14))
    each = numbers + area * 2 * _ROUNDING
    return 4 * (area * (inputs * block + _ROUNDING) + num_threads * each)


def gated_linear_bytes(rows: int, words: int, width: int, num_threads: int) -> int:
    """Scratch of ``gated_linear.c``: the packed weight, and rows of each thread.

    `words` are those of a row of its input: two numbers in bfloat16, else one.
    """
    weight = 2 * (-(-width // 16) * 16) * words
    each = min(112, rows // num_threads + 14) * (words + _ROUNDING)
    return 4 * (weight + num_threads * each)


def attention_bytes(width: int, num_threads: int) -> int:
    """Scratch of ``attention.c`` for heads of that width: queries, and a block of keys."""
    padded = -(-width // 32) * 32
    rows, keys = 448, 256
    each = rows * (width + _ROUNDING + padded) + keys * 2 * padded + 2 * 14 * keys + 2 * rows
    return 4 * num_threads * (each + 8 * _ROUNDING)


def scratch_bytes(products: Iterable[OpShape], paths: Sequence[str], num_threads: int) -> int:
    """Scratch of the kernel that needs most: they compute one after the other."""
    found = (size for each in products for size in _scratch(each, paths, num_threads))
    return max(found, default=0)


def _scratch(product: OpShape, paths: Sequence[str], num_threads: int) -> Iterator[int]:
    """Scratch for that product, if its sizes suit a kernel of these paths."""
    if product.dtype not in _MOST_PRODUCTS:
        return
    shapes = product.shapes
    if product.kind == "convolution":
        yield from _winograd(product, paths, num_threads)
    elif product.kind == "attention" and "native-flash" in paths:
        yield attention_bytes(shapes[0][-1], num_threads)
    elif product.kind == "product" and "native-gated-linear" in paths and len(shapes[-1]) == 2:
        # Which layer has a gate is not known here: of the denoisers that have them, the largest.
        (rows, depth), (_, outputs) = shapes[-2:]
        words = depth // 2 if product.dtype == "bfloat16" else depth
        yield gated_linear_bytes(rows, words, outputs // 2, num_threads)


def _winograd(product: OpShape, paths: Sequence[str], num_threads: int) -> Iterator[int]:
    given, (outputs, channels, *kernel) = product.shapes[:2]
    stride, padding, dilation, is_transposed, _, groups = product.parameters
    is_usual = {*stride, *dilation, groups} == {1} and not is_transposed
    if not is_usual or min(outputs, channels) < FEWEST_CHANNELS:
        return
    sizes = [
        size + 2 * pad - taps + 1
        for size, pad, taps in zip(given[2:], padding, kernel, strict=True)
    ]
    if kernel[-2:] == [3, 3] and "winograd" in paths:
        images, (height, width) = given[0] * prod(sizes[:-2]), sizes[-2:]
        inputs = channels * prod(kernel[:-2])
        if saves_products(product.dtype, inputs, images, height, width):
            tiles = images * -(-height // 4) * -(-width // 4)
            yield winograd_bytes(inputs, outputs, tiles, num_threads)
    elif kernel == [3, 1, 1] and "temporal-winograd" in paths and product.dtype == "float32":
        frames, pixels = sizes[0], given[0] * prod(sizes[1:])
        if saves_products_over_time(frames, pixels):
            tiles = -(-frames // 4) * pixels
            yield winograd_bytes(channels, outputs, tiles, num_threads, area=6)


def constant_bytes(weight_bytes: int) -> int:
    """Most bytes of all results that `cached-constants` stores for a model with these weights."""
    return max(weight_bytes // 16, 64 * 2**20)


def feature_bytes(products: Sequence[tuple[OpShape, float]], element_bytes: int) -> int:
    """Bytes of DeepCache's features while a whole step of a UNet computes them again.

    Each call has one tensor, of the size that the last convolution reads. The old one stays until
    the new one is there, to be compared with it. `products` are those of one step, in order.
    """
    found = [pair for pair in products if pair[0].kind == "convolution"]
    if not found:
        return 0
    last, operations = found[-1]
    given, (outputs, _, *kernel) = last.shapes[:2]
    in_all_calls = int(operations) // (2 * outputs * prod(kernel))
    return (in_all_calls + prod(given)) * element_bytes
