"""Constant results are found in any model, served for the same inputs, and for nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import LTXVideoTransformer3DModel, WanTransformer3DModel
from torch import Tensor, nn

from everyframe.fast_paths.apply import applies_to, swap_modules
from everyframe.fast_paths.modules.constant_modules import ConstantModule, find_constant_modules
from everyframe.fast_paths.modules.constant_results import MOST_RESULTS, PATH, CachedConstants
from everyframe.ops.call_override import ModuleCall
from everyframe.ops.native import library

pytestmark = pytest.mark.usefixtures("inference_mode")


@pytest.fixture
def model() -> nn.Module:
    with torch.inference_mode(False):
        torch.manual_seed(0)
        made = WanTransformer3DModel(
            num_attention_heads=2, attention_head_dim=16, num_layers=2, ffn_dim=32, text_dim=16,
            in_channels=4, out_channels=4, freq_dim=16,
        )  # fmt: skip
        return made.eval().requires_grad_(False)


def text(seed: int = 5) -> Tensor:
    return torch.randn(1, 7, 16, generator=torch.Generator().manual_seed(seed))


def answer(model: nn.Module, step: int, prompt: Tensor, side: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    latents = torch.randn(1, 4, 2, side, 4, generator=generator)
    timestep = torch.tensor([900.0 - step])
    out: Tensor = model(latents, timestep, prompt, return_dict=False)[0]
    return out


def counted(model: nn.Module) -> list[str]:
    """Names of the modules that are computed from here on."""
    names: list[str] = []
    for name, each in model.named_modules():
        each.register_forward_hook(lambda *_, name=name: names.append(name))
    return names


def test_what_depends_on_the_prompt_alone_is_found_and_computed_once(model: nn.Module) -> None:
    assert applies_to(PATH, model)
    assert not applies_to(PATH, nn.Linear(2, 2))
    prompts = (text(5), text(6))  # two branches of guidance
    plain = [answer(model, step, each) for step in range(4) for each in prompts]
    with CachedConstants(model) as cache:
        found = [answer(model, step, each) for step in range(2) for each in prompts]
        computed = counted(model)  # hooks are part of a module's state: stored anew
        found += [answer(model, step, each) for step in range(2, 4) for each in prompts]
    assert all(map(torch.equal, found, plain))
    assert cache.modules is not None
    names = {each.name for each in cache.modules}
    cross = {f"blocks.{n}.attn2.{each}" for n in (0, 1) for each in ("to_k", "to_v", "norm_k")}
    assert names == {"rope", "condition_embedder.text_embedder", *cross}
    # Once for each prompt; the table of positions once more, to see that it depends on sizes only.
    assert computed.count("blocks.1.attn2.to_k") == 2
    assert computed.count("condition_embedder.text_embedder") == 2
    assert computed.count("rope") == 2
    assert computed.count("blocks.1.attn2.to_q") == 4
    before = len(computed)
    assert torch.equal(answer(model, 0, prompts[0]), plain[0])
    assert {*cross} < {*computed[before:]}, "nothing is left on the model"


@pytest.mark.skipif(bool(missing := library.why_not()), reason=str(missing))
def test_results_of_our_kernels_are_followed(model: nn.Module) -> None:
    swap_modules(model, ["native-norm", "native-gelu", "native-flash"])
    with CachedConstants(model) as cache:
        answer(model, 0, text())
    assert cache.modules is not None
    names = {each.name for each in cache.modules}
    assert {"condition_embedder.text_embedder", "blocks.1.attn2.norm_k"} <= names
    assert not any("attn1" in each or "to_q" in each for each in names)


def merge(model: Any, prompt: Tensor) -> None:
    """As a LoRA is merged."""
    model.blocks[1].attn2.to_v.weight.add_(0.01)


def exchange(model: Any, prompt: Tensor) -> None:
    layer = model.blocks[0].attn2.to_k
    layer.weight.data = layer.weight.data * 1.01


def rewrite(model: Any, prompt: Tensor) -> None:
    prompt.mul_(1.1)


def observe(model: Any, prompt: Tensor) -> None:
    model.blocks[0].attn2.norm_k.register_forward_hook(lambda *given: given[2] * 2)


@pytest.mark.parametrize("change", [merge, exchange, rewrite, observe])
@pytest.mark.parametrize("is_inference", [True, False])
def test_a_change_is_seen(
    model: nn.Module, change: Callable[[Any, Tensor], None], is_inference: bool
) -> None:
    with torch.inference_mode(is_inference):
        prompt = text()
    with CachedConstants(model):
        before = [answer(model, step, prompt) for step in (0, 1, 2, 2)][-1]
        change(model, prompt)
        found = answer(model, 2, prompt)
        again = answer(model, 2, prompt)
    assert not torch.equal(found, before)
    assert torch.equal(found, answer(model, 2, prompt))
    assert torch.equal(again, found)


def test_another_size_has_its_own_positions(model: nn.Module) -> None:
    sizes = (4, 8, 4, 8, 4, 8)
    plain = [answer(model, step, text(), side) for step, side in enumerate(sizes)]
    with CachedConstants(model):
        found = [answer(model, step, text(), side) for step, side in enumerate(sizes)]
    assert all(map(torch.equal, found, plain))


def test_an_input_that_is_new_in_each_step_is_given_up(model: nn.Module) -> None:
    with CachedConstants(model):
        for step in range(MOST_RESULTS + 3):
            found = answer(model, step, text(step))
        assert torch.equal(found, answer(model, step, text(step)))
        computed = counted(model)
        for _ in range(2):
            answer(model, step, text(step))
    assert computed.count("blocks.0.attn2.to_k") == 2, "it is stored no more"


def test_who_writes_to_a_served_result_gets_a_new_one(model: nn.Module) -> None:
    prompt = text()
    embedder: Any = model.get_submodule("condition_embedder.text_embedder")
    want = embedder(prompt)
    with CachedConstants(model):
        for step in range(3):
            answer(model, step, prompt)
        embedder(prompt).zero_()
        assert torch.equal(embedder(prompt), want)


class Reading(nn.Module):
    """Its second part looks constant but uses a number of the latents."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.random = Scaled(), Scaled(), Noise()

    def forward(self, hidden_states: Tensor, prompt: Tensor) -> Tensor:
        x: Tensor = hidden_states + self.first(prompt, 2.0) + self.random(prompt)
        return x + self.second(prompt, float(hidden_states.sum()))


class Scaled(nn.Module):
    def forward(self, x: Tensor, by: float) -> Tensor:
        return x * by


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        table = torch.empty(x.shape[-1])
        torch.randn(x.shape[-1], out=table)
        return x + table


def found_in(model: nn.Module, *args: Tensor) -> tuple[ConstantModule, ...]:
    return find_constant_modules(ModuleCall(model, type(model), args, {}))[1]


class OtherTensors(ModuleCall):
    """A call that computes with other tensors than those that it was given."""

    def compute(self) -> Any:
        return self.module(self.args[0].sum(), text()[..., 0])


def test_numbers_of_the_latents_and_random_ones_vary() -> None:
    model, x = Reading(), torch.ones(3)
    _, found = find_constant_modules(OtherTensors(model, type(model), (x, text()), {}))
    assert not found, "nothing is known of tensors that it was not given"
    found = found_in(model, x, torch.ones(3))
    assert [each.name for each in found] == ["first"]


def test_a_hook_that_looks_at_the_timestep_changes_nothing(model: nn.Module) -> None:
    model.register_forward_pre_hook(lambda _, args: print(float(args[1])))
    with CachedConstants(model) as cache:
        answer(model, 0, text())
    assert cache.modules


def test_sound_that_is_denoised_beside_the_frames_varies() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.video, self.audio, self.text = Scaled(), Scaled(), Scaled()

        def forward(
            self, hidden_states: Tensor, audio_hidden_states: Tensor, encoder_hidden_states: Tensor
        ) -> Tensor:
            text = self.text(encoder_hidden_states, 2.0)
            video = self.video(hidden_states, 2.0)
            out: Tensor = video + self.audio(audio_hidden_states, 2.0) + text
            return out

    ones = torch.ones(3)
    (found,) = found_in(Both(), ones, ones.clone(), ones.clone())
    assert found.name == "text"


def test_a_view_of_what_varies_varies() -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Scaled()

        def forward(self, hidden_states: Tensor) -> Tensor:
            table = torch.zeros(3)
            table[:2] = hidden_states[:2]
            return self.part(table, 2.0)  # type: ignore[no-any-return]

    assert found_in(Writing(), torch.ones(3)) == ()


def test_calls_that_are_none_of_the_videos_are_plain() -> None:
    with torch.inference_mode(False):
        model = LTXVideoTransformer3DModel(
            num_layers=1, num_attention_heads=2, attention_head_dim=8, cross_attention_dim=16,
            caption_channels=16, in_channels=4, out_channels=4,
        ).requires_grad_(False)  # fmt: skip
    is_paused = True
    given: dict[str, Any] = {
        "encoder_attention_mask": torch.ones(1, 7), "num_frames": 2, "height": 2, "width": 2,
        "return_dict": False,
    }  # fmt: skip

    def call(step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        latents = torch.randn(1, 8, 4, generator=generator)
        out: Tensor = model(latents, text(), torch.tensor([step]), **given)[0]
        return out

    with CachedConstants(model, lambda: is_paused) as cache:
        call(1)
        assert cache.modules is None
        is_paused = False
        call(1)
        assert {each.name for each in cache.modules or ()} == {
            "rope", "caption_projection",
            *(f"transformer_blocks.0.attn2.{each}" for each in ("to_k", "to_v", "norm_k")),
        }  # fmt: skip
        call(2)
        computed = counted(model)
        call(2), call(2)
        is_paused = True
        call(2)
    assert computed.count("caption_projection") == 2, "one is stored with its new hooks, one plain"
