"""Precision policy: choose a component's dtype on a device, with the reasons.

It decides from facts alone, so it also answers for described devices, and never imports torch.
Measured numbers stand beside the rules. `cast_hooks` applies the choice; `everyframe.fast_paths`
decides about fast paths.
"""

from __future__ import annotations

from dataclasses import dataclass

from everyframe.core.errors import InputError
from everyframe.core.facts import DeviceFacts
from everyframe.core.plan import Precision

#: Values of a request's dtype option.
ASKABLE = ("auto", "float32", "bfloat16", "float16")

#: On a CPU, components with fewer parameters stay in float32. Measured with STDiT3 on one core with
#: AVX512-BF16, time in float32 over time in bf16: 1.1 at hidden 128 (3 million parameters), 1.4 at
#: 256 (14 million), 1.6 at 512 (37 million), 1.9 at 1152. Below the limit, the rounding is not
#: worth it.
CPU_BF16_PARAMETERS = 10_000_000

#: On a CPU, fp16 slower than float32 by more than this factor is refused; it would only halve the
#: memory.
MOST_FP16_SLOWDOWN = 2.0

#: First compute capability of CUDA with products of fp8.
FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True)
class ComponentNeeds:
    """Numeric requirements of a component, as its family knows them.

    Attributes:
        name: component.
        num_parameters: number of parameters.
        islands: patterns (`precision.islands`) of modules that need float32's resolution.
        range_islands: patterns of modules that need float32's range only; bfloat16 has it as well.
        prefers: dtype in which upstream runs it or its weights were made; ``float32`` keeps `auto`
            from going lower.
        force_upcast: the checkpoint states that fp16 overflows in it.
        decoder_islands: of an autoencoder made for float32 whose decoder may be tried in bfloat16:
            all modules outside of the decoder. Empty if it may not.
    """

    name: str
    num_parameters: int
    islands: tuple[str, ...] = ()
    range_islands: tuple[str, ...] = ()
    prefers: str = "bfloat16"
    force_upcast: bool = False
    decoder_islands: tuple[str, ...] = ()


def choose(
    device: DeviceFacts, asked: str, needs: ComponentNeeds, *, force: bool = False
) -> tuple[Precision, tuple[str, ...]]:
    """Choose the precision of a component, with notes for the plan.

    `asked` is ``auto`` or a dtype that overrides it; `force` allows what would be refused for its
    cost. Each note is a whole sentence; most choices need none.

    Raises:
        InputError: `asked` is not in `ASKABLE`, does not exist on the device, or is fp16 on a CPU
            that is slow in it, without `force`.
    """
    if asked not in ASKABLE:
        raise InputError(f"dtype must be one of {', '.join(ASKABLE)}, got {asked!r}")
    check_asked(device, asked, force=force)
    dtype, notes = _auto(device, needs) if asked == "auto" else _as_asked(device, asked, needs)
    islands = () if dtype == "float32" else needs.islands
    if dtype != "float32" and asked == "auto":
        islands += needs.decoder_islands
    if dtype == "float16":
        islands += needs.range_islands
    return Precision(parameters=dtype, compute=dtype, islands=islands), notes


def check_asked(device: DeviceFacts, asked: str, *, force: bool = False) -> None:
    """Raise `InputError` for a dtype that the device lacks, or that needs `force`."""
    if asked != "auto" and asked not in device.dtypes:
        raise InputError(
            f"{device.name} has no {asked}; give --dtype auto or one of {', '.join(device.dtypes)}"
        )
    price = _price_of_fp16(device)
    if asked == "float16" and price and not force:
        raise InputError(
            f"fp16 on a CPU: {price}, and saves nothing but memory; give --dtype bf16 or fp32, "
            "or --force to use it anyway"
        )


def _price_of_fp16(device: DeviceFacts) -> str:
    """Cost of fp16 on a CPU that is slow in it, in words; empty otherwise."""
    if device.kind != "cpu":
        return ""
    slowdown = device.fp16_slowdown
    if slowdown is None:
        return "" if device.has_fast_fp16 else "this one has no fp16 instructions"
    if slowdown <= MOST_FP16_SLOWDOWN:
        return ""
    how = "was tried and takes" if device.rates is None else "takes"
    return f"this one {how} up to {slowdown:.0f} times as long as float32"


def _auto(device: DeviceFacts, needs: ComponentNeeds) -> tuple[str, tuple[str, ...]]:
    is_made_wide = needs.prefers == "float32" or needs.force_upcast
    # On a CPU with fast bfloat16, a float32 decoder would take most of a short run. `force_upcast`
    # is about the range of fp16; bfloat16 has that of float32.
    if is_made_wide and not (device.kind == "cpu" and needs.decoder_islands):
        return "float32", ()
    if device.kind == "cpu":
        return _auto_on_cpu(device, needs), ()
    if device.has_fast_bf16:
        return "bfloat16", ()
    if device.kind in ("cuda", "mps") and "float16" in device.dtypes:
        return "float16", _notes_of_fp16(device, needs)
    return "float32", ()


def _auto_on_cpu(device: DeviceFacts, needs: ComponentNeeds) -> str:
    pays = device.has_fast_bf16 and needs.num_parameters >= CPU_BF16_PARAMETERS
    return "bfloat16" if pays else "float32"


def _as_asked(
    device: DeviceFacts, asked: str, needs: ComponentNeeds
) -> tuple[str, tuple[str, ...]]:
    if asked == "float16" and needs.force_upcast:
        return "float32", (
            f"{needs.name}: float32 although fp16 was asked; its checkpoint says that fp16 "
            "overflows in it, which gives black frames.",
        )
    if asked == "float16":
        return asked, _notes_of_fp16(device, needs)
    if asked == "bfloat16":
        return asked, _notes_of_bf16(device, needs)
    return asked, ()


def _notes_of_fp16(device: DeviceFacts, needs: ComponentNeeds) -> tuple[str, ...]:
    notes = []
    price = _price_of_fp16(device)
    if price:
        notes.append(f"{needs.name}: fp16 on a CPU; {price}. Use bf16 or fp32.")
    elif device.kind != "cpu" and not device.has_fast_fp16:
        notes.append(
            f"{needs.name}: fp16 saves memory on {device.name} but no time, for lack of fast fp16 "
            "arithmetic."
        )
    if needs.prefers != "float16":
        notes.append(
            f"{needs.name}: fp16 ends at 65504 and upstream runs this part in {needs.prefers}; "
            "values beyond that become infinite. --dtype fp32 is safe and takes twice the memory."
        )
    return tuple(notes)


def _notes_of_bf16(device: DeviceFacts, needs: ComponentNeeds) -> tuple[str, ...]:
    notes = []
    if not device.has_fast_bf16:
        notes.append(
            f"{needs.name}: {device.name} has no bf16 matrix instructions and emulates them, which "
            "is slower than fp32."
        )
    if needs.prefers == "float32" or needs.force_upcast:
        notes.append(
            f"{needs.name}: bf16 keeps 8 bits of a number and this part was made for float32; "
            "the picture may change visibly."
        )
    return tuple(notes)
