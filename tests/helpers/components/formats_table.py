"""Results of diffusers and of Everyframe for each format of a component's file."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor

from everyframe.adapters.component_file import match_component
from everyframe.runtime.components.patchable import table_of_module
from helpers.components import originals, stored

State = dict[str, Tensor]
_PREFIX = "model.diffusion_model."


@dataclass(frozen=True)
class Form:
    """A form: who stores it, a key of it, the tensors' maker, and the component (a tiny Wan's)."""

    makers: str
    key: str
    write: Callable[[Path, State], State]
    component: str = "wan"
    suffix: str = ".safetensors"


def _plain(prefix: str) -> Callable[[Path, State], State]:
    def write(path: Path, state: State) -> State:
        stored.write(path, {prefix + key: each for key, each in state.items()})
        return originals.wide(state)

    return write


def _scaled(*, is_mixed: bool) -> Callable[[Path, State], State]:
    def write(path: Path, state: State) -> State:
        tensors, meant = stored.scaled(state, _PREFIX, is_mixed=is_mixed)
        stored.write(path, tensors)
        return meant

    return write


def _plain_fp8(path: Path, state: State) -> State:
    tensors, meant = stored.plain_fp8(state)
    stored.write(path, {_PREFIX + key: each for key, each in tensors.items()})
    return meant


def _gguf(kind: str) -> Callable[[Path, State], State]:
    return lambda path, state: stored.write_gguf(path, state, kind)[1]


FORMS: Mapping[str, Form] = {
    "original": Form("authors", "blocks.0.self_attn.q.weight", _plain("")),
    "comfyui": Form("ComfyUI, whole", f"{_PREFIX}blocks.0.self_attn.q.weight", _plain(_PREFIX)),
    "short": Form("ComfyUI, saved by its nodes", "diffusion_model.blocks.0.self_attn.q.weight",
                  _plain("diffusion_model.")),
    "fp8": Form("fp8 without scales", f"{_PREFIX}blocks.0.self_attn.q.weight", _plain_fp8),
    "scaled": Form("ComfyUI, fp8_scaled", f"{_PREFIX}blocks.0.self_attn.q.scale_weight",
                   _scaled(is_mixed=False)),
    "mixed": Form("ComfyUI, mixed", f"{_PREFIX}blocks.0.self_attn.q.comfy_quant",
                  _scaled(is_mixed=True)),
    "gguf": Form("GGUF, Q8_0", "blocks.0.self_attn.q.weight", _gguf("Q8_0"), suffix=".gguf"),
    "vae": Form("authors, autoencoder", "decoder.upsamples.0.residual.2.weight", _plain(""),
                "wan_vae"),
    "umt5": Form("authors, text encoder", "blocks.0.attn.q.weight", _plain(""), "umt5"),
    "umt5_scaled": Form("ComfyUI, text encoder in fp8_scaled", "blocks.0.attn.q.scale_weight",
                        lambda path, state: _text_scaled(path, state), "umt5"),
    "umt5_gguf": Form("llama.cpp, text encoder", "enc.blk.0.attn_q.weight", _gguf("Q8_0"),
                      "umt5_llama_cpp", ".gguf"),
}  # fmt: skip


def _text_scaled(path: Path, state: State) -> State:
    tensors, meant = stored.scaled(state)
    stored.write(path, tensors)
    return meant


def made(name: str, folder: Path) -> tuple[Path, State]:
    """The file in that form, and what its tensors mean by the module's names."""
    form = FORMS[name]
    path = folder / f"{name}{form.suffix}"
    meant = form.write(path, originals.original_state(form.component))
    plain = stored.write(folder / f"{name}-meant.safetensors", meant)
    return path, _found(plain, form.component)


def _found(path: Path, component: str) -> State:
    table = table_of_module(originals.module(component))
    tensors = match_component(path, table, component).tensors
    return {key: tensors.load(key) for key in tensors}


def largest_error(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Largest difference of a tensor, relative to its largest value."""
    errors = []
    for key, each in wanted.items():
        scale = each.double().abs().max().clamp(min=1e-12)
        errors.append(((found[key].double() - each.double()).abs().max() / scale).item())
    return max(errors)


def here(name: str, folder: Path) -> str:
    """What Everyframe makes of the form."""
    path, wanted = made(name, folder)
    error = largest_error(_found(path, FORMS[name].component), wanted)
    return "right" if error <= 2.0**-24 else f"**wrong** by {error:.2g}"


def in_diffusers(name: str, folder: Path) -> str:
    """What diffusers' `from_single_file` makes of it, in a few words."""
    form = FORMS[name]
    module: Any = originals.module(form.component)
    if not hasattr(module, "from_single_file"):
        return "not read"
    path, wanted = made(name, folder)
    module.save_config(folder / f"{name}-config")
    more: dict[str, Any] = {}
    if form.suffix == ".gguf":
        more["quantization_config"] = diffusers.GGUFQuantizationConfig(torch.float32)
    diffusers.utils.logging.set_verbosity_error()
    try:
        found = type(module).from_single_file(
            str(path), config=str(folder / f"{name}-config"), torch_dtype=torch.float32, **more
        )
        if more:
            from diffusers.quantizers.gguf.utils import dequantize_gguf_tensor

            state = {
                key: dequantize_gguf_tensor(each.detach())
                if hasattr(each, "quant_type") else each.detach()
                for key, each in found.named_parameters()
            }  # fmt: skip
        else:
            state = found.state_dict()
        error = largest_error(state, wanted)
    except (ValueError, KeyError, RuntimeError, AttributeError, TypeError, ImportError) as failed:
        text = " ".join(str(failed).replace("`", "").replace("|", "/").split())
        text = text.replace(str(folder), "…")
        short = text if len(text) < 70 else f"{text[:66]} …"
        return f"`{type(failed).__name__}: {short}`"
    return "right" if error < 1e-6 else f"**wrong** by {error:.2g}, no message"


def rows(measure: Callable[[str, Path], str] = in_diffusers) -> list[str]:
    """The lines of the page's table; `measure` says what diffusers makes of a form."""
    with tempfile.TemporaryDirectory() as folder:
        return [
            f"| {form.makers} | `{form.key}` | {measure(name, Path(folder))} "
            f"| {here(name, Path(folder))} |"
            for name, form in FORMS.items()
        ]
