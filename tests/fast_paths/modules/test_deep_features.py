"""A shallow call of a UNet computes its full resolution, and takes the rest from a whole call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor, nn

from everyframe.core.facts import DeviceFacts
from everyframe.dry_run import executor
from everyframe.dry_run.result import DryRunResult
from everyframe.families.svd.unet import VideoUNet
from everyframe.fast_paths.modules import deep_features
from everyframe.fast_paths.modules.deep_features import DeepFeatures, deep_modules
from everyframe.fast_paths.path_sizes import feature_bytes
from helpers.diagonals import diagonal

pytestmark = pytest.mark.usefixtures("inference_mode")

SIZES: dict[str, Any] = {
    "block_out_channels": (8, 8), "layers_per_block": 2, "sample_size": 8, "cross_attention_dim": 16
}  # fmt: skip
SPATIO_TEMPORAL: dict[str, Any] = {
    **SIZES, "block_out_channels": (32, 64), "num_frames": 2, "num_attention_heads": 2,
    "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
    "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
    "projection_class_embeddings_input_dim": 24, "addition_time_embed_dim": 8,
}  # fmt: skip
CPU = DeviceFacts("a processor", "cpu", None, 10**10, 10**10)
ADDED = torch.tensor([[6.0, 127.0, 0.02]])

Call = Callable[[Tensor, float], Tensor]


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ours() -> tuple[nn.Module, Call]:
    unet = VideoUNet(**SPATIO_TEMPORAL)
    context = unet.context(drawn(1, 1, 16), ADDED, 2)
    return unet, lambda x, t: unet(x.reshape(1, 2, 8, 8, 8), torch.tensor([t]), context)


def stable_video() -> tuple[nn.Module, Call]:
    unet = diffusers.UNetSpatioTemporalConditionModel(**SPATIO_TEMPORAL)
    given = drawn(1, 1, 1, 16)
    return unet, lambda x, t: unet(x.reshape(1, 2, 8, 8, 8), t, given, ADDED).sample


def animatediff() -> tuple[nn.Module, Call]:
    unet = diffusers.UNetMotionModel(
        **SIZES, in_channels=8, norm_num_groups=2, motion_num_attention_heads=2,
        num_attention_heads=2, down_block_types=("CrossAttnDownBlockMotion", "DownBlockMotion"),
        up_block_types=("UpBlockMotion", "CrossAttnUpBlockMotion"),
    )  # fmt: skip
    text = drawn(1, 2, 5, 16)
    return unet, lambda x, t: unet(x.reshape(1, 8, 2, 8, 8), t, text).sample


def i2vgen() -> tuple[nn.Module, Call]:
    unet = diffusers.I2VGenXLUNet(
        block_out_channels=(8, 8), layers_per_block=2, sample_size=8, cross_attention_dim=16,
        norm_num_groups=2, attention_head_dim=4, num_attention_heads=None,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
    )  # fmt: skip
    text, picture, latents = drawn(1, 1, 5, 16), drawn(2, 1, 16), drawn(3, 1, 4, 2, 8, 8)

    def call(x: Tensor, t: float) -> Tensor:
        answer: Tensor = unet(
            x.reshape(1, 8, 2, 8, 8)[:, :4], t, torch.tensor([8]), latents, picture, text
        ).sample
        return answer

    return unet, call


UNETS = (ours, stable_video, animatediff, i2vgen)


@pytest.fixture(params=UNETS, ids=lambda make: make.__name__)
def unet(request: pytest.FixtureRequest) -> tuple[nn.Module, Call]:
    with torch.inference_mode(False), torch.no_grad():
        torch.manual_seed(0)
        found: tuple[Any, Call] = request.param()
        for parameter in found[0].parameters():  # some end in layers of zeros
            if not parameter.any():
                parameter.normal_(std=0.1)
        found[0].eval().requires_grad_(False)
        return found


def test_a_shallow_call_of_the_same_inputs_has_the_same_bits(unet: tuple[Any, Call]) -> None:
    module, call = unet
    x = drawn(7, 1024)
    whole = call(x, 3.0)
    computed: list[str] = []
    for name, each in module.named_modules():
        each.register_forward_hook(lambda *_, name=name: computed.append(name))
    with DeepFeatures(module) as features:
        features.is_shallow = True
        assert torch.equal(call(x, 3.0), whole), "there is nothing to take: it is whole"
        all_of_them, computed[:] = set(computed), []
        features.begin()
        assert torch.equal(call(x, 3.0), whole), "nothing of the way is lost"
        layers = {name for name in all_of_them - {*computed} if name.count(".") == 1}
        assert layers >= {"down_blocks.1", "up_blocks.0"}
        assert {"down_blocks.0", "up_blocks.1"} <= {*computed}
        inside = {each for each in computed if each.startswith("up_blocks.1.resnets.")}
        assert {each.split(".")[3] for each in inside} == {"1", "2"}, "the last layers alone"
        inside = {each for each in computed if each.startswith("down_blocks.0.resnets.")}
        assert {each.split(".")[3] for each in inside} == {"0"}
        features.begin()
        other = call(drawn(8, 1024), 2.0)
        assert not torch.equal(other, whole), "the latents are read"
    own = call(drawn(8, 1024), 2.0)
    assert not torch.equal(other, own), "and of the deep layers they are not"
    assert torch.equal(call(x, 3.0), whole), "nothing is left on the module"


def test_each_call_of_a_step_has_its_own_features(unet: tuple[Any, Call]) -> None:
    module, call = unet
    given = [(drawn(seed, 1024), 3.0) for seed in (7, 8)]
    want = [call(*each) for each in given]
    with DeepFeatures(module) as features:
        for is_shallow in (False, True, True):
            features.begin()
            features.is_shallow = is_shallow
            assert all(map(torch.equal, [call(*each) for each in given], want))
            assert features.drift is None
        features.is_shallow = False
        features.begin()
        changed = [call(drawn(9, 1024), 2.0) for _ in given]
        assert torch.equal(*changed)
        assert features.drift is not None
        assert 0 < features.drift < 3
        features.clear()
        features.is_shallow = True
        features.begin()
        assert torch.equal(call(*given[0]), want[0]), "dropped"


def test_calls_of_a_repair_are_whole_and_leave_nothing(unet: tuple[Any, Call]) -> None:
    """What a rank computes alone has other sizes than its share, and a repair changes modules."""
    module, call = unet
    x, is_paused = drawn(7, 1024), False
    want = call(x, 3.0)
    with DeepFeatures(module, lambda: is_paused) as features:
        call(drawn(8, 1024), 2.0)
        is_paused = features.is_shallow = True
        features.begin()
        assert torch.equal(call(x, 3.0), want)
        is_paused = False
        assert not features.is_filled
        features.begin()
        assert torch.equal(call(x, 3.0), want)


def test_calls_of_another_size_are_whole() -> None:
    torch.manual_seed(0)
    unet = VideoUNet(**SPATIO_TEMPORAL).eval()
    context = unet.context(drawn(1, 2, 16), ADDED.expand(2, -1), 2)
    x, t = drawn(7, 2, 2, 8, 8, 8), torch.tensor([1.0, 1.0])
    with DeepFeatures(unet) as features:
        together = unet(x, t, context)
        features.is_shallow = True
        features.begin()
        for row in (0, 1):  # memory was short: one branch after the other
            apart = unet(x[row : row + 1], t[:1], context.rows(slice(row, row + 1)))
            torch.testing.assert_close(apart[0], together[row])


def test_what_is_left_out_lies_in_no_other(unet: tuple[Any, Call]) -> None:
    deep = list(deep_modules(unet[0]))
    inside = [each for one in deep for each in one.modules() if each is not one]
    assert not {*map(id, deep)} & {*map(id, inside)}


@pytest.mark.parametrize(("unet", "num_calls"), diagonal(UNETS, [1, 2]), indirect=["unet"])
def test_a_plan_counts_what_whole_steps_hold(unet: tuple[Any, Call], num_calls: int) -> None:
    """Counted in dry runs: a step, and the second of two steps with features."""
    module, call = unet
    given = [drawn(seed, 1024) for seed in range(num_calls)]

    def steps(features: DeepFeatures | None = None) -> None:
        for _ in range(1 if features is None else 2):
            if features is not None:
                features.begin()
            for x in given:
                call(x, 3.0)

    def with_features() -> None:
        with DeepFeatures(module) as features:
            steps(features)

    def found(run: Callable[[], None]) -> DryRunResult:
        parts = {"unet": executor.DryRunModule(module, None)}
        results = executor.dry_run_modules(parts, lambda _: run(), CPU, is_foreign=True)
        assert not results.stopped
        return results.found["unet"]

    plain, deep = found(steps), found(with_features)
    held = deep.working_bytes - plain.working_bytes
    counted = feature_bytes(plain.work.products, 4)
    # What is new is alive anyway in some UNets, as the next layers read it. Other results are four
    # bytes each.
    assert counted * num_calls / (num_calls + 1) <= held <= counted + 400


def test_features_are_compared_a_frame_at_a_time() -> None:
    old, new = (drawn(seed, 16, 4, 8, 8).bfloat16() for seed in (1, 2))
    want = (new.double() - old.double()).norm() / new.double().norm()
    assert deep_features._relative_change(old, new) == pytest.approx(float(want), rel=1e-12)
    parts = {"": executor.DryRunModule(nn.Identity(), None)}
    given = [each.to("meta") for each in (old, new)]
    found = executor.dry_run_modules(
        parts, lambda _: deep_features._relative_change(*given), CPU, is_foreign=True
    ).found[""]
    # As float64, one tensor of all frames has four times the bytes.
    assert found.working_bytes < old.nbytes
