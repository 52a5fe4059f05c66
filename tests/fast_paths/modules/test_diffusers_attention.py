"""diffusers' attention and activation in C, beside diffusers' own in the same process."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers import LTXVideoTransformer3DModel, MochiTransformer3DModel, WanTransformer3DModel
from diffusers.models.activations import GELU
from diffusers.models.attention_processor import Attention
from diffusers.models.autoencoders.autoencoder_kl_cosmos import (
    CosmosCausalAttention,
    CosmosSpatialAttentionProcessor2_0,
)
from diffusers.models.autoencoders.autoencoder_kl_wan import WanAttentionBlock
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from everyframe.core.plan import Precision
from everyframe.dry_run.call import DryRunCall
from everyframe.dry_run.executor import dry_run
from everyframe.fast_paths.apply import places_of, swap_modules
from everyframe.fast_paths.benchmark import run_comparisons
from everyframe.fast_paths.certification.attention_trial import native
from everyframe.fast_paths.certification.target import CertificationTarget, TargetCall
from everyframe.fast_paths.registry import CATALOGUE
from everyframe.ops.native import kernels
from everyframe.ops.native.library import why_not
from helpers.native_paths import CPU

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.usefixtures("inference_mode"),
]

WAN: dict[str, Any] = {
    "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "ffn_dim": 48,
    "text_dim": 24, "in_channels": 4, "out_channels": 4,
}  # fmt: skip


def wan() -> WanTransformer3DModel:
    torch.manual_seed(0)
    return WanTransformer3DModel(**WAN).eval()


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 4, 3, 8, 8, generator=generator)
    return x, torch.tensor([437.0, 437.0]), torch.randn(2, 7, 24, generator=generator)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of queries that the kernel was given."""
    found: list[tuple[int, ...]] = []
    right = kernels.attention

    def noted(q: Tensor, *rest: Any) -> Tensor:
        found.append(tuple(q.shape))
        return right(q, *rest)

    monkeypatch.setattr(kernels, "attention", noted)
    return found


def test_wan_computes_the_same_in_c(calls: list[tuple[int, ...]]) -> None:
    """Against the model in float64, which our kernels don't take; float32 leaves 1e-6."""
    model, given = wan(), inputs()
    truth = copy.deepcopy(model).double()(*(each.double() for each in given), return_dict=False)[0]
    swap_modules(model, ("native-flash", "native-gelu"))
    got = model(*given, return_dict=False)[0]
    assert len(calls) == 2 * 2  # to the video and to the text, in each block
    assert (got - truth).norm() <= 5e-6 * truth.norm()


def _mochi() -> tuple[nn.Module, dict[str, Any], tuple[int, ...]]:
    model = MochiTransformer3DModel(
        num_attention_heads=2, attention_head_dim=8, num_layers=2, pooled_projection_dim=16,
        in_channels=4, text_embed_dim=24, time_embed_dim=4, max_sequence_length=7,
    )  # fmt: skip
    latents, timestep, text = inputs()
    given = {
        "hidden_states": latents, "timestep": timestep, "encoder_hidden_states": text,
        "encoder_attention_mask": torch.tensor([[1] * 5 + [0] * 2] * 2), "return_dict": False,
    }  # fmt: skip
    return model, given, (1, 2, 3 * 4 * 4 + 5, 8)


def _wan_decoder() -> tuple[nn.Module, dict[str, Any], tuple[int, ...]]:
    model = WanAttentionBlock(16)
    nn.init.normal_(model.proj.weight)
    return model, {"x": torch.randn(2, 16, 3, 4, 6)}, (6, 1, 24, 16)


def _cosmos_decoder() -> tuple[nn.Module, dict[str, Any], tuple[int, ...]]:
    model = CosmosCausalAttention(1, 16, processor=CosmosSpatialAttentionProcessor2_0())
    return model, {"hidden_states": torch.randn(2, 16, 3, 4, 6)}, (6, 1, 24, 16)


@pytest.mark.parametrize("make", [_mochi, _wan_decoder, _cosmos_decoder])
def test_attention_of_classes_of_their_own(
    make: Callable[[], Any], calls: list[tuple[int, ...]]
) -> None:
    torch.manual_seed(0)
    model, given, shape = make()
    model.eval()
    want = model(**given)
    swap_modules(holder := nn.Sequential(model), ("native-flash",))
    torch.testing.assert_close(holder[0](**given), want, atol=1e-5, rtol=1e-5)
    assert {*calls} == {shape}


def test_masked_attention_is_left_to_torch(calls: list[tuple[int, ...]]) -> None:
    """LTX masks its text: half of its attention has no kernel of ours."""
    torch.manual_seed(0)
    model = LTXVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=2,
        cross_attention_dim=32, caption_channels=24,
    ).eval()  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    given = {
        "hidden_states": torch.randn(1, 12, 4, generator=generator),
        "encoder_hidden_states": torch.randn(1, 6, 24, generator=generator),
        "timestep": torch.tensor([300.0]),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0]]),
        "num_frames": 3, "height": 2, "width": 2, "return_dict": False,
    }  # fmt: skip
    want = model(**given)[0]
    swap_modules(model, ("native-flash",))
    torch.testing.assert_close(model(**given)[0], want, atol=1e-5, rtol=1e-5)
    assert calls == [(1, 2, 12, 16)] * 2


def test_who_intercepts_attention_goes_first(calls: list[tuple[int, ...]]) -> None:
    """Ranks exchange tokens inside of torch's function, before anything is computed."""
    seen = []

    class Intercepts(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func is F.scaled_dot_product_attention)
            return func(*args, **(kwargs or {}))

    model = wan()
    swap_modules(model, ("native-flash",))
    with Intercepts():
        model(*inputs())
    assert seen.count(True) == 4
    assert not calls


def test_a_module_set_to_plain_or_with_gradients_computes_itself(
    calls: list[tuple[int, ...]],
) -> None:
    layer = nn.Sequential(Attention(query_dim=16, heads=2, dim_head=8)).eval()
    x = torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(0))
    want = layer(x)
    swap_modules(layer, ("native-flash",))
    layer[0].is_plain = True
    assert torch.equal(layer(x), want)
    layer[0].is_plain = False
    with torch.inference_mode(False), torch.enable_grad():
        layer(x.clone())
    assert not calls
    torch.testing.assert_close(layer(x), want, atol=1e-5, rtol=1e-5)
    assert len(calls) == 1


def test_swapped_classes_keep_what_others_read() -> None:
    """Names of arguments, parameters and hooks; a class is swapped once."""
    model = wan()
    names, part = list(model.state_dict()), model.blocks[0].attn1
    arguments = inspect.signature(part.forward)
    swap_modules(model, ("native-flash",))
    assert list(model.state_dict()) == names
    assert inspect.signature(model.blocks[0].attn1.forward) == arguments
    assert isinstance(model.blocks[0].attn1, type(part))
    assert places_of("native-flash", model) == ()
    copied = copy.deepcopy(model)
    assert torch.equal(copied(*inputs())[0], model(*inputs())[0])


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_the_projected_gelu_is_computed_in_c(
    approximate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = nn.Sequential(GELU(16, 32, approximate=approximate))
    x = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0))
    want = layer(x)
    swap_modules(layer, ("native-gelu",))
    called = []
    right = kernels.gelu
    monkeypatch.setattr(kernels, "gelu", lambda *a: called.append(0) or right(*a))
    torch.testing.assert_close(layer(x), want, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(layer.double()(x.double()).float(), want, atol=1e-6, rtol=1e-5)
    assert len(called) == 1


def target() -> CertificationTarget:
    with torch.device("meta"):
        model = WanTransformer3DModel(**WAN)

    def answer(modules: Any, device: str) -> Any:
        return modules["transformer"](*(each.to(device) for each in inputs()))[0]

    whole = Precision("float32", "float32")
    call = DryRunCall("denoise", "transformer", ("transformer",), lambda: {"transformer": model},
                      answer, 1, "key", lambda *_: ("proj_out",))  # fmt: skip
    run = dry_run(call, {"transformer": whole}, CPU)
    own = TargetCall(call, {"transformer": whole})
    return CertificationTarget("transformer", CPU, 1, whole, "plan", "device", (own,),
                               tuple(run.found["transformer"].work.products))  # fmt: skip


def test_its_trial_compares_attention_alone() -> None:
    comparisons = list(native(target(), CATALOGUE["native-flash"]))
    assert len(comparisons) == 2
    outcome = run_comparisons(iter(comparisons), "cpu", 1e12)
    assert 0 < outcome.error <= outcome.limit


def test_its_trial_refuses_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last key of each query is left out."""
    right = kernels.attention

    def wrong(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return right(q, k[:, :, :-1], v[:, :, :-1], scale)

    monkeypatch.setattr(kernels, "attention", wrong)
    comparisons = native(target(), CATALOGUE["native-flash"])
    outcome = run_comparisons(comparisons, "cpu", 1e12)
    assert outcome.error > outcome.limit
