"""Write tensors in each storage format, and compute their stored values in float64."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

State = dict[str, Tensor]
_FP8 = torch.float8_e4m3fn


def is_layer(key: str, tensor: Tensor) -> bool:
    """Whether ComfyUI would store it in eight bits."""
    return key.endswith(".weight") and tensor.ndim == 2


def write(
    path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
) -> Path:
    """Save as safetensors."""
    save_file({key: each.clone().contiguous() for key, each in tensors.items()}, path, metadata)
    return path


def _rounded(tensor: Tensor, *, by_rows: bool) -> tuple[Tensor, Tensor]:
    """(fp8 values, float32 scale); scales are no powers of two, so that a wrong one shows."""
    largest = tensor.abs().amax(dim=1) if by_rows else tensor.abs().amax()
    scale = (largest / 300).to(torch.float32).clamp(min=1e-12)
    return (tensor / (scale[:, None] if by_rows else scale)).to(_FP8), scale


def scaled(
    state: Mapping[str, Tensor], prefix: str = "", *, is_mixed: bool = False, by_rows: bool = False
) -> tuple[State, State]:
    """(tensors of a scaled fp8 file, what they mean in float64 by the names of `state`).

    The first generation has ``scale_weight`` and a marker, the mixed one ``weight_scale`` and
    ``comfy_quant``.
    """
    tensors: State = {} if is_mixed else {f"{prefix}scaled_fp8": torch.zeros(2, dtype=_FP8)}
    meant: State = {}
    for key, each in state.items():
        if not is_layer(key, each):
            tensors[prefix + key], meant[key] = each, each.double()
            continue
        values, scale = _rounded(each, by_rows=by_rows)
        stem = prefix + key.removesuffix("weight")
        tensors[f"{stem}weight"] = values
        tensors[f"{stem}{'weight_scale' if is_mixed else 'scale_weight'}"] = scale
        tensors[f"{stem}{'input_scale' if is_mixed else 'scale_input'}"] = torch.tensor(1.0)
        if is_mixed:
            text = json.dumps({"format": "float8_e4m3fn"}).encode()
            tensors[f"{stem}comfy_quant"] = torch.tensor(list(text), dtype=torch.uint8)
        wide = scale.double()
        meant[key] = values.double() * (wide[:, None] if by_rows else wide)
    return tensors, meant


def plain_fp8(state: Mapping[str, Tensor]) -> tuple[State, State]:
    """(tensors whose layers are cast to fp8, what they mean)."""
    tensors = {key: each.to(_FP8) if is_layer(key, each) else each for key, each in state.items()}
    return tensors, {key: each.double() for key, each in tensors.items()}


def random_blocks(kind: Any, count: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """So many blocks of a quantized kind as bytes, of random codes and small finite scales."""
    import gguf

    _, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(seed).integers(0, 256, (count, size), dtype=np.uint8)
    for place in _SCALES[kind.name]:
        # float16 of an exponent in the middle, either sign.
        blocks[:, place + 1] = (blocks[:, place + 1] & 0x83) | 0x28
    return blocks


#: Where the float16 scales are in a block of each kind.
_SCALES: Mapping[str, tuple[int, ...]] = {
    "Q8_0": (0,), "Q4_0": (0,), "Q5_0": (0,), "Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
    "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,), "IQ1_S": (0,),
}  # fmt: skip
KINDS = tuple(_SCALES)


def write_gguf(
    path: Path, state: Mapping[str, Tensor], kind: str = "Q8_0", arch: str = "wan", **values: int
) -> tuple[Path, State]:
    """Save as GGUF; layers whose rows are whole blocks in that kind, the rest in F16 and F32.

    Returns what the tensors mean, by the package's own dequantization.
    """
    import gguf

    writer = gguf.GGUFWriter(str(path), arch)
    for name, number in values.items():
        writer.add_uint32(name.replace("__", "."), number)
    meant: State = {}
    quantized = gguf.GGMLQuantizationType[kind]
    block, _ = gguf.GGML_QUANT_SIZES[quantized]
    for key, each in state.items():
        numbers = each.detach().float().numpy()
        is_whole = is_layer(key, each) and each.shape[-1] % block == 0
        own = (
            quantized if is_whole else gguf.GGMLQuantizationType["F16" if each.ndim > 1 else "F32"]
        )
        if each.ndim > 4:  # more than ggml has: flattened, and the shape beside it
            writer.add_array(f"comfy.gguf.orig_shape.{key}", [int(side) for side in each.shape])
            numbers = numbers.reshape(-1)
        data = gguf.quants.quantize(numbers, own)
        writer.add_tensor(key, data, raw_dtype=own)
        again = gguf.quants.dequantize(data, own).reshape(each.shape)
        meant[key] = torch.from_numpy(np.array(again))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, meant
