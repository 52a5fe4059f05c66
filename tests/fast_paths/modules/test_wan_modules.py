"""Wan's blocks with modulation, gates and rotation in C, beside diffusers' own in float64."""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from diffusers import ChronoEditTransformer3DModel, WanTransformer3DModel, WanVACETransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from everyframe.core.plan import Precision
from everyframe.dry_run.call import DryRunCall
from everyframe.fast_paths.apply import places_of, swap_modules
from everyframe.fast_paths.benchmark import relative_error, run_comparisons
from everyframe.fast_paths.certification.target import CertificationTarget, TargetCall
from everyframe.fast_paths.certification.trials import modules
from everyframe.fast_paths.modules import wan_modules
from everyframe.fast_paths.registry import CATALOGUE
from everyframe.ops.native import kernels
from everyframe.ops.native.library import why_not
from helpers.native_paths import CPU

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.usefixtures("inference_mode"),
]

PATHS = ("native-gate", "native-rope")
WAN: dict[str, Any] = {
    "num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2, "ffn_dim": 48,
    "text_dim": 24, "in_channels": 4, "out_channels": 4,
}  # fmt: skip
PICTURE: dict[str, Any] = {"image_dim": 8, "added_kv_proj_dim": 24}


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def inputs(*timesteps: int) -> dict[str, Any]:
    timestep = numbers(2, *timesteps).abs() * 500
    return {"hidden_states": numbers(2, 4, 3, 8, 8), "timestep": timestep,
            "encoder_hidden_states": numbers(2, 7, 24)}  # fmt: skip


def with_picture() -> dict[str, Any]:
    text = numbers(2, 512, 24)
    return {**inputs(), "encoder_hidden_states": text,
            "encoder_hidden_states_image": numbers(2, 257, 8)}  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]]]] = {
    "Wan 2.1": (lambda: WanTransformer3DModel(**WAN), inputs),
    "Wan 2.1 of a picture": (lambda: WanTransformer3DModel(**WAN, **PICTURE), with_picture),
    "Wan 2.2, tokens' own timesteps": (
        lambda: WanTransformer3DModel(**WAN, cross_attn_norm=False), partial(inputs, 3 * 4 * 4)
    ),
    "ChronoEdit": (lambda: ChronoEditTransformer3DModel(**WAN, **PICTURE), with_picture),
    "VACE": (
        lambda: WanVACETransformer3DModel(**WAN, vace_layers=[0], vace_in_channels=6),
        lambda: {**inputs(), "control_hidden_states": numbers(2, 6, 3, 8, 8)},
    ),
}  # fmt: skip


def made(name: str) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model, given = (make() for make in MODELS[name])
    for table in (p for key, p in model.named_parameters() if key.endswith("scale_shift_table")):
        table.data.copy_(numbers(*table.shape))
    return model.eval(), given


def answer(model: nn.Module, given: dict[str, Any], dtype: torch.dtype = torch.float32) -> Tensor:
    cast = {key: x.to(dtype) if x.is_floating_point() else x for key, x in given.items()}
    found: Tensor = model(**cast, return_dict=False)[0]
    return found


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that were called."""
    found: list[str] = []
    right = kernels.call

    def noted(name: str, *given: Any, output: Tensor) -> None:
        found.append(name)
        right(name, *given, output=output)

    monkeypatch.setattr(kernels, "call", noted)
    return found


@pytest.mark.parametrize("others", [(), ("native-flash", "native-norm", "native-gelu")])
@pytest.mark.parametrize("name", MODELS)
def test_blocks_compute_the_same_in_c(name: str, others: tuple[str, ...], calls: list[str]) -> None:
    """Our kernels don't take float64; float32 leaves 1e-6."""
    model, given = made(name)
    truth = answer(copy.deepcopy(model).double(), given, torch.float64)
    swap_modules(model, (*others, *PATHS))
    assert relative_error(answer(model, given), truth) < 5e-6
    assert calls.count("gated_sum") == 2 * 2
    # Blocks of VACE's conditions are classes of their own, with the same attention.
    assert calls.count("rotate") == 2 * (3 if name == "VACE" else 2)
    assert ("attention" in calls) == bool(others)


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_is_as_close_as_plain(name: str, calls: list[str]) -> None:
    model, given = made(name)
    truth = answer(model, given)
    plain = model.bfloat16()
    for key, p in plain.named_parameters():
        if key.endswith("scale_shift_table") or "norm1" in key or "norm2" in key:
            p.data = p.data.float()
    fast = copy.deepcopy(plain)
    swap_modules(fast, PATHS)
    errors = [relative_error(answer(each, given, torch.bfloat16), truth) for each in (plain, fast)]
    assert errors[1] < 1.2 * errors[0]
    assert {"row_norm", "gated_sum", "rotate"} <= {*calls}


def test_what_the_kernels_cannot_compute_is_computed_plainly(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients, a repair, a processor that somebody else has set, one timestep for two samples."""
    model, given = made("Wan 2.1")
    want = answer(model, given)
    swap_modules(model, PATHS)
    for part in model.modules():
        if hasattr(part, "is_plain"):
            part.is_plain = True
    assert torch.equal(answer(model, given), want)
    assert not calls
    for part in model.modules():
        if hasattr(part, "is_plain"):
            part.is_plain = False
    attention: Any = model.get_submodule("blocks.0.attn1")
    other = type("WanAttnProcessor", (type(attention.processor),), {})
    for block in model.blocks:  # type: ignore[union-attr]
        block.attn1.processor = other()
    assert relative_error(answer(model, given), want) < 5e-6
    assert "rotate" not in calls
    calls.clear()
    with torch.inference_mode(False), torch.enable_grad():
        again, given = made("Wan 2.1")
        swap_modules(again, PATHS)
        answer(again, given)
    assert not calls
    block, x = model.get_submodule("blocks.0"), numbers(2, 5, 24)
    table, text = numbers(1, 6, 24), numbers(2, 3, 24)
    plain = type(block).__mro__[2].forward(block, x, text, table, None)
    assert not calls
    assert torch.equal(block(x, text, table, None), plain)


def test_a_branch_of_another_dtype_is_added_as_diffusers_adds_it() -> None:
    class Half(WanAttnProcessor):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
            found: Tensor = super().__call__(*args, **kwargs)
            return found.half()

    model, given = made("Wan 2.1")
    block: Any = model.get_submodule("blocks.0")
    block.attn1.processor = Half()
    want = answer(model, given)
    swap_modules(model, PATHS)
    assert relative_error(answer(model, given), want) < 5e-6


def test_swapped_classes_keep_what_others_read() -> None:
    """Names of parameters and of arguments, in whatever order the paths come."""
    model, given = made("Wan 2.1")
    names, block = list(model.state_dict()), model.get_submodule("blocks.0")
    parts: Any = block, block.attn1
    arguments = [list(inspect.signature(part.forward).parameters) for part in parts]
    kinds = []
    for paths in ((*PATHS, "native-flash"), ("native-flash", *PATHS)):
        fast: Any = copy.deepcopy(model)
        swap_modules(fast, paths)
        assert list(fast.state_dict()) == names
        swapped = fast.blocks[0], fast.blocks[0].attn1
        assert arguments == [list(inspect.signature(each.forward).parameters) for each in swapped]
        assert all(isinstance(each, type(part)) for each, part in zip(swapped, parts, strict=True))
        assert not any(places_of(path, fast) for path in PATHS)
        kinds.append([type(each) for each in swapped])
        assert relative_error(answer(copy.deepcopy(fast), given), answer(model, given)) < 5e-6
    assert kinds[0] == kinds[1]


def target(dtype: str) -> CertificationTarget:
    with torch.device("meta"):
        model = WanTransformer3DModel(**WAN)

    def run(modules: Any, device: str) -> Any:
        given = {key: x.to(device) for key, x in inputs().items()}
        return modules["transformer"](**given, return_dict=False)[0]

    whole = Precision(dtype, dtype)
    call = DryRunCall("denoise", "transformer", ("transformer",), lambda: {"transformer": model},
                      run, 1, "key", lambda *_: ("proj_out",))  # fmt: skip
    own = TargetCall(call, {"transformer": whole})
    return CertificationTarget("transformer", CPU, 1, whole, "plan", "device", (own,))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("path", PATHS)
def test_a_trial_times_what_a_path_changes(path: str, dtype: str) -> None:
    (part,) = modules(target(dtype), CATALOGUE[path])
    assert part.weight == 2
    with FlopCounterMode(display=False) as counter:
        part.fast()
    assert counter.get_total_flops() == 0
    assert run_comparisons([part], "cpu", time.monotonic() + 100).is_right


@pytest.mark.parametrize("path", PATHS)
def test_a_trial_sees_a_wrong_path(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = {"native-gate": "gated_add", "native-rope": "rotate"}[path]
    right = getattr(kernels, name)
    monkeypatch.setattr(kernels, name, lambda x, *given: 1.01 * right(x, *given))
    found = run_comparisons(
        modules(target("float32"), CATALOGUE[path]), "cpu", time.monotonic() + 100
    )
    assert not found.is_right


def test_only_classes_of_diffusers_are_replaced() -> None:
    own = type("WanAttention", (nn.Module,), {})
    assert wan_modules.fused_kind("native-rope", own) is None
