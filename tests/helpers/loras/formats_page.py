"""The page of LoRA formats: results of diffusers and of Everyframe for each layout.

``python -m helpers.loras.formats_page`` in ``tests/`` writes ``docs/reference/formats.md``; it
needs peft and gguf. `tests/adapters/test_formats_page.py` compares the page with measurements.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from copy import deepcopy
from importlib.metadata import version
from pathlib import Path
from typing import Any

import diffusers
import torch

from helpers.components import formats_table
from helpers.components.stored import KINDS
from helpers.loras import files as lora_files
from helpers.loras.layouts import LAYOUTS, MODEL, is_right, made, wanted

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "formats.md"


def in_diffusers(name: str, folder: Path) -> str:
    """What diffusers makes of the file, in a few words."""
    own = made(name)
    path = lora_files.write(folder / f"{name}.safetensors", own.tensors, own.metadata)
    transformer = deepcopy(lora_files.denoiser(MODEL)).eval()
    pipe = _pipeline(transformer)
    diffusers.utils.logging.set_verbosity_error()
    try:
        pipe.load_lora_weights(str(path))
        pipe.fuse_lora(components=["transformer"])
        pipe.unload_lora_weights()
    except (ValueError, KeyError, RuntimeError, AttributeError, TypeError) as error:
        text = " ".join(str(error).replace("`", "").replace("|", "/").split())
        short = text if len(text) < 70 else f"{text[:66]} …"
        return f"`{type(error).__name__}: {short}`"
    found = {key: each.detach() for key, each in transformer.named_parameters()}
    before = lora_files.state_of(MODEL)
    error = lora_files.largest_error(found, wanted(name))
    if error < 1e-5:
        return "right"
    if lora_files.largest_error(found, before) == 0:
        return "**no effect**, one line in the log"
    return f"**wrong** by {error:.2f}, no message"


def _pipeline(transformer: Any) -> Any:
    return diffusers.WanPipeline(
        tokenizer=None, text_encoder=None, vae=_Vae(), scheduler=None, transformer=transformer
    )


class _Vae(torch.nn.Module):
    """What a pipeline asks of its autoencoder when it is made."""

    class config:  # noqa: N801 - diffusers' name
        """Its factors."""

        scale_factor_temporal, scale_factor_spatial = 4, 8


def rows(measure: Callable[[str, Path], str]) -> list[str]:
    """The lines of the page's table; `measure` says what diffusers makes of a file."""
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for name, layout in LAYOUTS.items():
            ours = "right" if is_right(name) else "**wrong**"
            ours += f"; {layout.note}" if layout.note else ""
            theirs = measure(name, Path(folder))
            lines.append(f"| {layout.makers} | `{layout.key}` | {theirs} | {ours} |")
    return lines


_HEAD = """\
# Formats of LoRA files and checkpoints

Made by `python -m helpers.loras.formats_page` in `tests/` from the files that the tests make:
random factors for a tiny Wan, written in each layout. "Right" means the weights that merging by
hand in float64 gives, to 1e-6. What diffusers {version} with PEFT {peft} makes of each file was
measured by the same program, by `load_lora_weights` and `fuse_lora`. How to use such files:
[LoRA](../how-to/lora.md).

| made by | a key of it | diffusers | Everyframe |
|---|---|---|---|
"""

_TAIL = """
Files are safetensors, or pickles that hold tensors alone. Names are those of diffusers, or of the
model's authors for Wan and its kin, LTX-Video, LTX-2, HunyuanVideo, CogVideoX, Mochi, and the UNets
of Stable Diffusion and Stable Video Diffusion. A file for two denoisers (Wan 2.2) names them by
`transformer.` and `transformer_2.`, or is given as `FILE@high`, `FILE@low`, `FILE@both`.

What is refused, in one line that names the tensor: a factor without its partner, factors of two
ranks, a shape that is not the weight's, a suffix of no known kind, a module that the model has not
(with the model that the file looks made for), NaN and infinity, a truncated file, whole layers
beside the adapter (`modules_to_save`), and layers of another shape (`reshape_weight`).
"""


_COMPONENTS = """
## Files of components

Made from the tests' files too: a tiny Wan's transformer, autoencoder or text encoder in each form.
"Right" means the tensors that the form means by float64 arithmetic (or by the `gguf` package's
own), to half a unit of float32's last place. What diffusers {version} makes of each was measured by
`from_single_file`; it has none for text encoders. How to use such files:
[single files](../how-to/single-files.md).

| made by | a key of it | diffusers | Everyframe |
|---|---|---|---|
"""

_LAST = """
Original names are known for the denoisers of Wan and its kin, LTX-Video, LTX-2, HunyuanVideo,
CogVideoX, Mochi, Stable Diffusion and Stable Video Diffusion; for the autoencoders of Wan 2.1 and
2.2, LTX-Video, HunyuanVideo and CogVideoX (ComfyUI's); and for T5, UMT5 and Llama (Wan's own file
and llama.cpp's). Any other component is read by the names of its module. Kinds of GGUF: {kinds}.

What is refused, in one line that names the tensor: one that is for no parameter, a parameter that
no tensor is for, another shape, two tensors for one parameter, a scale without its weight or of
another shape, scales that are not finite, formats of other bits (`nvfp4`, `mxfp8`, `convrot`),
GGUF kinds that the package can't read, and truncated files. What is left out is in the plan:
a tokenizer in the file, tables that the model computes, other components of a whole checkpoint.
"""


def page(measure: Callable[[str, Path], str] = in_diffusers) -> str:
    """The whole page."""
    versions = {"version": version("diffusers"), "peft": version("peft")}
    loras = _HEAD.format(**versions) + "\n".join(rows(measure)) + "\n" + _TAIL
    components = _COMPONENTS.format(**versions) + "\n".join(formats_table.rows()) + "\n"
    return loras + components + _LAST.format(kinds=", ".join(KINDS))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
