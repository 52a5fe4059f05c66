"""Traces of whole runs and of somebody's own modules: recorded, compared, and replayed."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_hunyuan_video import (
    HunyuanVideoResnetBlockCausal3D,
)
from torch import nn

import everyframe
from everyframe.cli.tables import json_line
from everyframe.core.errors import InputError, NumericsError
from everyframe.core.events import Event, FramesDecoded
from everyframe.core.request import Request
from everyframe.engine import tracing
from everyframe.engine.run import stream
from everyframe.fast_paths.apply import swap_modules
from everyframe.numerics.trace import file
from everyframe.runtime.components.component_observers import on_component_loaded
from helpers import traced_modules
from helpers.tiny_checkpoints import opensora as tiny_opensora
from helpers.tiny_checkpoints import pipelines as tiny_pipelines

CORE = "denoiser.spatial_blocks.1.attn.core"
ASKED: dict[str, Any] = {
    "prompt": "a red circle", "size": "32x32", "num_frames": 5, "num_inference_steps": 2,
    "seed": 1, "device": "cpu",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_opensora.opensora_1_2(tmp_path_factory.mktemp("models") / "tiny")


def request(model: Path, **more: Any) -> Request:
    return Request(model=str(model), **{**ASKED, **more})


def recorded(model: Path, path: Path, *full: str, **more: Any) -> list[Event]:
    return list(tracing.record(request(model, **more), path, full))


@pytest.fixture(scope="module")
def right(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "a.trace"
    EVENTS[path] = recorded(model, path, CORE)
    return path


#: What happened while a trace was recorded.
EVENTS: dict[Path, list[Event]] = {}


def planting(component: str, module: nn.Module) -> None:
    """Puts a half-precision sum into one attention of the denoiser, as another card may have."""
    if component == "denoiser":
        inner = module.get_submodule(CORE.removeprefix("denoiser.").removesuffix(".core"))
        inner.core = traced_modules.HalfAccumulating()


@pytest.fixture(scope="module")
def wrong(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "b.trace"
    with on_component_loaded(planting):
        recorded(model, path, CORE)
    return path


def test_recording_changes_no_frame(model: Path, right: Path) -> None:
    def frames(events: Iterable[Event]) -> np.ndarray[Any, Any]:
        return np.concatenate([each.frames for each in events if isinstance(each, FramesDecoded)])

    plain = frames(stream(request(model)))
    assert np.array_equal(frames(EVENTS[right]), plain)


def test_a_trace_holds_every_component_and_no_path(model: Path, right: Path) -> None:
    trace = file.read(right)
    assert {part.component for part in trace.parts} == {"text_encoder", "denoiser", "vae"}
    calls = [c.number for c in trace.calls if trace.parts[c.part].name == "denoiser"]
    assert calls == [1, 2]
    assert trace.same["size"] == "32x32"
    assert "denoiser float32" in trace.about["precision"]
    assert str(model.parent) not in str({**trace.same, **trace.about})
    assert right.stat().st_size < 300_000


def test_bfloat16_is_explained(model: Path, right: Path, tmp_path: Path) -> None:
    recorded(model, tmp_path / "b.trace", dtype="bf16")
    verdict = everyframe.trace_diff(right, tmp_path / "b.trace")
    assert verdict.is_explained, verdict.place
    assert 1e-3 < verdict.compared.largest < 0.3
    assert verdict.png("t").startswith(b"\x89PNG")


def test_a_planted_half_precision_sum_is_named_and_replayed(
    model: Path, right: Path, wrong: Path
) -> None:
    verdict = tracing.diff(right, wrong, model=str(model))
    assert verdict.place is not None
    assert verdict.place.message.startswith(f"{CORE}, call 1: its output differs by")
    assert verdict.replayed, verdict.notes
    (found,) = verdict.replayed
    assert found.wrong == ("second",)
    assert verdict.to_json()["place"]["module"] == CORE
    # The other way round it is the first that is wrong.
    assert tracing.diff(wrong, right, model=str(model)).replayed[0].wrong == ("first",)


def test_without_the_model_the_place_is_still_named(right: Path, wrong: Path) -> None:
    verdict = tracing.diff(right, wrong)
    assert verdict.place is not None
    assert verdict.replayed == ()
    assert any("tiny" in note for note in verdict.notes)


def test_two_sizes_are_refused(model: Path, right: Path, tmp_path: Path) -> None:
    recorded(model, tmp_path / "b.trace", size="32x16", num_inference_steps=1)
    with pytest.raises(InputError, match="two sizes: size is 32x32 in the first trace and 32x16"):
        tracing.diff(right, tmp_path / "b.trace")


@pytest.mark.parametrize("what", ["model", "weights", "frames", "steps", "seed", "prompt"])
def test_other_runs_are_refused_and_why(right: Path, tmp_path: Path, what: str) -> None:
    trace = file.read(right)
    changed = dataclasses.replace(trace, same={**trace.same, what: "another"})
    file.write(changed, tmp_path / "b.trace")
    with pytest.raises(InputError, match=f"{what} is {trace.same[what][:20]}.* and another in the"):
        tracing.diff(right, tmp_path / "b.trace")


def test_a_run_that_breaks_leaves_its_trace(model: Path, right: Path, tmp_path: Path) -> None:
    def broken(component: str, module: nn.Module) -> None:
        if component == "denoiser":
            with torch.inference_mode(False):
                parameter = module.get_submodule("temporal_blocks.0.mlp.fc2").bias
            assert isinstance(parameter, nn.Parameter)
            parameter.data[3] = torch.nan

    with on_component_loaded(broken), pytest.raises(NumericsError):
        recorded(model, tmp_path / "b.trace")
    assert "not finite" in file.read(tmp_path / "b.trace").ended
    verdict = tracing.diff(right, tmp_path / "b.trace")
    assert verdict.place is not None
    assert "weights of denoiser.temporal_blocks.0.mlp.fc2" in verdict.place.message


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("denoisr.blocks.0", "did you mean 'denoiser'"),
        ("denoiser.spatial_blocks.9.attn", "did you mean 'denoiser.spatial_blocks"),
        ("denoiser.spatial_blocks", "the denoiser has no module"),
    ],
)
def test_modules_that_are_not_there(model: Path, tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        recorded(model, tmp_path / "a.trace", name)
    assert not list(tmp_path.iterdir())


def test_several_devices_are_refused(model: Path, tmp_path: Path) -> None:
    """Their workers are other processes, and each calls its modules with a part of the video."""
    with pytest.raises(InputError, match="a trace is recorded on one device"):
        recorded(model, tmp_path / "no.trace", num_devices=3)


def test_a_foreign_module(tmp_path: Path) -> None:
    net = traced_modules.net()
    core = "model.blocks.2.attn.core"
    for module, name in ((net, "a"), (traced_modules.planted(net, 2), "b")):
        with everyframe.trace(module, tmp_path / name, full=[core]):
            traced_modules.sample(module)
    assert not any(part._forward_hooks for part in net.modules())
    verdict = everyframe.trace_diff(tmp_path / "a", tmp_path / "b", net)
    assert verdict.place is not None
    assert verdict.place.message.startswith(f"{core}, call 1")
    assert verdict.replayed[0].wrong == ("second",)
    alone = everyframe.trace_diff(tmp_path / "a", tmp_path / "b")
    assert alone.place == verdict.place
    assert "everyframe.trace_diff(a, b, what)" in alone.notes[-1]


def test_growth_alone_is_passed_over(tmp_path: Path) -> None:
    class Steep(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(200 * x.float()).to(x.dtype)

    net = traced_modules.net()
    net.blocks[1].attn.out = nn.Sequential(Steep(), net.blocks[1].attn.out)
    name = "model.blocks.1.attn.out.0"
    for module, path in ((net, "a"), (copy.deepcopy(net).half(), "b")):
        with everyframe.trace(module, tmp_path / path, full=[name]):
            traced_modules.sample(module, steps=1)
    assert not tracing.diff(tmp_path / "a", tmp_path / "b").is_explained
    verdict = everyframe.trace_diff(tmp_path / "a", tmp_path / "b", net)
    assert verdict.is_explained
    assert "growth" in verdict.replayed[0].message
    # Of inputs and outputs that both differ without bounds.
    endless = dataclasses.replace(verdict.replayed[0], growth=math.nan, errors=(math.inf, 0.0))
    data = dataclasses.replace(verdict, replayed=(endless,)).to_json()
    assert (data["replayed"][0]["growth"], data["replayed"][0]["errors"]) == ("nan", ["inf", 0.0])
    assert json_line(data)


def test_blocks_that_raise_or_call_nothing(tmp_path: Path) -> None:
    net = traced_modules.net()

    def fail() -> None:
        with everyframe.trace(net, tmp_path / "a.trace"):
            traced_modules.sample(net, steps=1)
            raise RuntimeError("the third step")

    with pytest.raises(RuntimeError, match="the third step"):
        fail()
    assert file.read(tmp_path / "a.trace").ended == "RuntimeError: the third step"
    with (
        pytest.raises(InputError, match="none of model was called"),
        everyframe.trace(net, tmp_path / "b.trace"),
    ):
        pass
    assert not (tmp_path / "b.trace").exists()
    for what in (None, 3, {}, object()):
        with (
            pytest.raises(InputError, match="must be a torch module"),
            everyframe.trace(what, tmp_path / "b.trace"),
        ):
            pass
    with (
        pytest.raises(InputError, match=r"no component of 'net\.last'"),
        everyframe.trace(net, tmp_path / "b.trace", full=["net.last"]),
    ):
        pass


class Blocks(nn.Module):
    """A residual block of norms and SiLU, then a linear layer and a GELU."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([
            HunyuanVideoResnetBlockCausal3D(32), nn.Sequential(nn.Linear(8, 16), nn.GELU()),
        ])  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_what_a_fast_path_fuses_differs_by_rounding(tmp_path: Path) -> None:
    """The norm's result has SiLU on one machine alone, and so on; what comes after is compared."""
    x = torch.randn(1, 32, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    for name, paths in (("plain", ()), ("fused", ("native-norm", "linear-gelu"))):
        net = Blocks()
        swap_modules(net, paths)
        with torch.no_grad(), everyframe.trace(net, tmp_path / name):
            net(x)
    for one, two in (("plain", "fused"), ("fused", "plain")):
        verdict = everyframe.trace_diff(tmp_path / one, tmp_path / two)
        assert verdict.is_explained, verdict.place
        compared = [
            verdict.compared.a.parts[verdict.compared.a.calls[seen.call].part].module
            for seen, error in zip(verdict.compared.a.seen, verdict.compared.errors, strict=True)
            if seen.kind == "output" and not np.isnan(error)
        ]
        assert {"blocks.0.nonlinearity", "blocks.0.conv1.conv", "blocks.1.1"} <= {*compared}
        assert not {"blocks.0.norm1", "blocks.1.0"} & {*compared}


def test_a_pipeline_of_diffusers(tmp_path: Path) -> None:
    tiny_pipelines.cogvideox(tmp_path / "cog")
    latents = torch.randn(1, 3, 4, 2, 2, generator=torch.Generator().manual_seed(0))
    for dtype, path in ((torch.float32, "a"), (torch.float32, "b"), (torch.bfloat16, "c")):
        pipe = diffusers.CogVideoXPipeline.from_pretrained(tmp_path / "cog").to(dtype)
        pipe.set_progress_bar_config(disable=True)
        if path == "b":
            # A sum in half precision, where diffusers has its attention.
            pipe.transformer.transformer_blocks[0].attn1.to_v.register_forward_hook(
                lambda *given: given[-1].half().cumsum(1).diff(dim=1, prepend=given[-1][:, :1] * 0)
                .to(given[-1].dtype)
            )  # fmt: skip
        with everyframe.trace(pipe, tmp_path / f"{path}.trace"):
            pipe(
                "a fox", num_inference_steps=2, num_frames=9, height=16, width=16,
                max_sequence_length=16, latents=latents.to(dtype), output_type="pt",
            )  # fmt: skip
    trace = file.read(tmp_path / "a.trace")
    assert {part.component for part in trace.parts} == {"text_encoder", "transformer", "vae"}
    named = everyframe.trace_diff(tmp_path / "a.trace", tmp_path / "b.trace")
    assert named.place is not None
    assert named.place.message.startswith("transformer.transformer_blocks.0.attn1.to_v, call 1")
    explained = everyframe.trace_diff(tmp_path / "a.trace", tmp_path / "c.trace")
    assert explained.is_explained, explained.place
