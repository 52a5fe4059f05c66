"""The policy on made-up devices: each rule, and each note that a choice deserves."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from everyframe.core.errors import InputError
from everyframe.core.facts import DeviceFacts
from everyframe.precision.policy import CPU_BF16_PARAMETERS, ComponentNeeds, choose

GIB = 1 << 30


def device(kind: str, bf16: bool, fp16: bool, capability: tuple[int, int] | None) -> DeviceFacts:
    index = 0 if kind == "cuda" else None
    return DeviceFacts(f"a {kind}", kind, index, 8 * GIB, 8 * GIB, capability, bf16, fp16)


OLD_CPU = device("cpu", False, False, None)
NEW_CPU = device("cpu", True, False, None)
SLOW_CPU = replace(NEW_CPU, fp16_slowdown=86.4)
HALF_CPU = replace(NEW_CPU, fp16_slowdown=1.1)
PASCAL = device("cuda", False, False, (6, 1))
V100 = device("cuda", False, True, (7, 0))
A100 = device("cuda", True, True, (8, 0))
MPS = device("mps", False, True, None)

LARGE = ComponentNeeds("denoiser", 1_207_643_972, islands=("t_embedder", "final_layer"))
SMALL = ComponentNeeds("denoiser", CPU_BF16_PARAMETERS - 1, islands=("t_embedder",))
WANTS_FLOAT32 = ComponentNeeds("denoiser", 10**9, prefers="float32")
UPCAST = ComponentNeeds("vae", 83_653_863, force_upcast=True)
DECODER = ComponentNeeds(
    "vae", 97_743_311, prefers="float32", force_upcast=True, decoder_islands=("encoder",)
)


@pytest.mark.parametrize(
    ("where", "needs", "dtype"),
    [
        (OLD_CPU, LARGE, "float32"),
        (NEW_CPU, LARGE, "bfloat16"),
        (NEW_CPU, SMALL, "float32"),
        (A100, LARGE, "bfloat16"),
        (A100, SMALL, "bfloat16"),
        (V100, LARGE, "float16"),
        (PASCAL, LARGE, "float16"),
        (MPS, LARGE, "float16"),
        *[(where, WANTS_FLOAT32, "float32") for where in (OLD_CPU, NEW_CPU, V100, A100, MPS)],
        *[(where, UPCAST, "float32") for where in (OLD_CPU, NEW_CPU, V100, A100, MPS)],
        *[(where, DECODER, "float32") for where in (OLD_CPU, V100, A100, MPS)],
        (NEW_CPU, replace(DECODER, num_parameters=CPU_BF16_PARAMETERS - 1), "float32"),
    ],
)
def test_auto(where: DeviceFacts, needs: ComponentNeeds, dtype: str) -> None:
    precision, _ = choose(where, "auto", needs)
    assert (precision.parameters, precision.compute) == (dtype, dtype)
    assert precision.islands == (() if dtype == "float32" else needs.islands)


@pytest.mark.parametrize("asked", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("where", [OLD_CPU, V100, A100, MPS])
def test_a_dtype_that_was_asked_for_is_given(where: DeviceFacts, asked: str) -> None:
    assert choose(where, asked, LARGE, force=True)[0].parameters == asked


def test_fp16_on_a_cpu_is_refused_with_its_price_and_how_to_do_it() -> None:
    with pytest.raises(InputError, match=r"up to 86 times as long.*bf16 or fp32, or --force"):
        choose(SLOW_CPU, "float16", LARGE)
    precision, notes = choose(SLOW_CPU, "float16", LARGE, force=True)
    assert precision.parameters == "float16"
    assert "was tried and takes up to 86 times as long" in notes[0]


def test_fp16_on_a_cpu_that_is_fast_in_it_is_given_and_its_range_reported() -> None:
    precision, (note,) = choose(HALF_CPU, "float16", LARGE)
    assert precision.parameters == "float16"
    assert "65504" in note
    # By its flags where nobody tried.
    assert choose(replace(OLD_CPU, has_fast_fp16=True), "float16", LARGE)[1] == (note,)
    with pytest.raises(InputError, match="has no fp16 instructions"):
        choose(OLD_CPU, "float16", LARGE)


def test_a_dtype_that_a_device_does_not_have_is_refused() -> None:
    old = replace(MPS, dtypes=("float32", "float16"))
    with pytest.raises(InputError, match=r"a mps has no bfloat16; .*float32, float16"):
        choose(old, "bfloat16", LARGE, force=True)


def test_auto_without_risk_says_nothing() -> None:
    for where in (OLD_CPU, NEW_CPU, A100):
        assert choose(where, "auto", LARGE)[1] == ()


@pytest.mark.parametrize(
    ("where", "asked", "needs", "message"),
    [
        (SLOW_CPU, "float16", LARGE, "86 times as long"),
        (V100, "auto", LARGE, "65504"),
        (PASCAL, "auto", LARGE, "saves memory"),
        (V100, "bfloat16", LARGE, "emulates"),
        (A100, "bfloat16", UPCAST, "made for float32"),
        (A100, "bfloat16", WANTS_FLOAT32, "made for float32"),
        (A100, "float16", UPCAST, "black frames"),
    ],
)
def test_what_is_risky_is_reported(
    where: DeviceFacts, asked: str, needs: ComponentNeeds, message: str
) -> None:
    notes = choose(where, asked, needs, force=True)[1]
    assert any(message in note and note.startswith(needs.name) for note in notes)


def test_an_autoencoder_that_overflows_is_never_run_in_fp16() -> None:
    for where in (V100, A100, MPS):
        assert choose(where, "float16", UPCAST)[0].parameters == "float32"


def test_a_decoder_may_be_tried_in_bfloat16_on_a_cpu_that_has_it() -> None:
    """And nothing around it; what is asked for is given as for any component."""
    precision, notes = choose(NEW_CPU, "auto", DECODER)
    assert (precision.parameters, precision.islands, notes) == ("bfloat16", ("encoder",), ())
    assert choose(NEW_CPU, "float32", DECODER)[0].islands == ()
    asked, (note,) = choose(NEW_CPU, "bfloat16", DECODER)
    assert (asked.parameters, asked.islands) == ("bfloat16", ())
    assert "made for float32" in note


def test_another_dtype_is_refused() -> None:
    with pytest.raises(InputError, match=r"auto, float32.*got 'int8'"):
        choose(A100, "int8", LARGE)


def test_planning_needs_no_torch() -> None:
    code = (
        "import sys, everyframe.precision.policy, everyframe.precision.islands;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_islands_that_want_range_alone_are_left_to_bfloat16() -> None:
    needs = ComponentNeeds("t5", 10**9, islands=("*.norm",), range_islands=("*.wo",))
    device = DeviceFacts("made up", "cuda", 0, 10**10, 10**10, (8, 0), has_fast_bf16=True)
    assert choose(device, "bfloat16", needs)[0].islands == ("*.norm",)
    assert choose(device, "float16", needs)[0].islands == ("*.norm", "*.wo")
    assert choose(device, "float32", needs)[0].islands == ()
