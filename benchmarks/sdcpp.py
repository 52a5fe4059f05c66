"""stable-diffusion.cpp as a candidate of `peers.py`, where it builds: its transformer of Wan.

    pip download --no-deps --no-binary :all: stable-diffusion-cpp-python
    tar xf stable_diffusion_cpp_python-*.tar.gz
    cmake -S benchmarks/sdcpp -B BUILD -DCMAKE_BUILD_TYPE=Release \\
        -DSDCPP=$PWD/stable_diffusion_cpp_python-VERSION/vendor/stable-diffusion.cpp
    cmake --build BUILD --target wan
    SDCPP_LIBRARY=BUILD/libwan.so python benchmarks/peers.py --model wan

Its program takes whole models of released sizes alone, so a few lines of C++ call its transformer.
It computes one sample a call, so both branches of guidance are two calls, as in its own sampler.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from block_stacks import Call, Stack
from safetensors.torch import save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers.loras import original_names

#: Variable with the path of the library.
LIBRARY = "SDCPP_LIBRARY"

#: Weight types, by ggml's numbers.
WEIGHTS = {"float32": 0, "float16": 1, "q8_0": 8}


def wan(stack: Stack, weights: str) -> Call:
    """A guided call of the stack's Wan, with weights of that type and fused attention."""
    library = ctypes.CDLL(os.environ[LIBRARY])
    library.wan_load.restype = ctypes.c_void_p
    library.wan_forward.argtypes = [
        ctypes.c_void_p, ctypes.c_int, *[ctypes.c_void_p] * 2, ctypes.c_float, ctypes.c_void_p,
        ctypes.c_int64, ctypes.c_void_p,
    ]  # fmt: skip
    model: Any = stack.theirs(torch.float32)
    config = model.config
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "wan.safetensors"))
        save_file(original_names.wan(model.state_dict()), path)
        del model
        handle = library.wan_load(
            path.encode(), config.num_attention_heads, config.num_layers, config.ffn_dim,
            WEIGHTS[weights], 1,
        )  # fmt: skip
    if not handle:
        raise RuntimeError("stable-diffusion.cpp can't load the weights")
    x, t, text = (each.numpy() for each in stack.inputs(torch.float32))
    sizes = np.array(x.shape[2:], np.int64)

    def run() -> Tensor:
        made = np.empty_like(x)
        for number in range(len(x)):
            failed = library.wan_forward(
                handle, torch.get_num_threads(), x[number].ctypes.data, sizes.ctypes.data,
                float(t[number]), text[number].ctypes.data, text.shape[1],
                made[number].ctypes.data,
            )  # fmt: skip
            if failed:
                raise RuntimeError("stable-diffusion.cpp could not compute")
        return torch.from_numpy(made)

    return run
