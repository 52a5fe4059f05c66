"""Savings are chosen where memory is short, and the released models fit into 8 GB with them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from everyframe.core.bytes import parse_bytes
from everyframe.core.errors import InputError
from everyframe.core.facts import DeviceFacts
from everyframe.core.plan import ComponentPlan, Precision, peak_of
from everyframe.core.request import Request
from everyframe.dry_run.call import DryRunCall
from everyframe.families.opensora.components import OpenSoraBuilder
from everyframe.families.opensora.config import OpenSoraConfig, STDiT3Config
from everyframe.families.opensora.vae_config import VideoVAEConfig
from everyframe.families.svd.components import SVDBuilder
from everyframe.families.svd.config import SVDConfig, released
from everyframe.families.svd.options import SVDOptions
from everyframe.families.t5_tokenizer import T5_XXL
from everyframe.hardware.profiles import find_profile
from everyframe.planning import component_precision
from everyframe.planning.dry_runs import DryRun, dry_run
from everyframe.planning.infeasible import infeasible_reason
from everyframe.planning.memory.component_memory import ComponentPlanner
from everyframe.planning.memory.memory_fit import FitResult, MemoryFit, with_memory_limit
from everyframe.runtime.stages import tiling
from helpers import config_only_models
from helpers.guard_modules import plan

GB = 10**9
CARD = find_profile("cuda-sm86").machine().devices[0]


def card(memory: int, profile: str = "cuda-sm86") -> DeviceFacts:
    device = find_profile(profile).machine().devices[0]
    return replace(device, memory=memory, free_memory=memory)


def fitting(model: Any, device: DeviceFacts, host_memory: int = 32 * GB) -> MemoryFit:
    return MemoryFit(ComponentPlanner(model, device, "auto", False, host_memory))


def part(fitted: FitResult, name: str) -> Any:
    return next(each for each in fitted.components if each.name == name)


def test_where_there_is_room_nothing_is_saved() -> None:
    fitted = fitting(config_only_models.svd(), CARD).fit(config_only_models.settings(64, 64, 4))
    assert fitted.fits
    assert fitted.changes == ()
    assert fitted.settings.savings == ()


@pytest.mark.parametrize("stage", [None, "all of it"])
def test_ranks_of_one_cpu_are_counted_by_part(stage: str | None) -> None:
    """By hand: what the first rank alone loads is there once, all else as often as there are
    ranks; also where parts share a stage, as those of a pipeline do.
    """
    model, settings = config_only_models.svd(), config_only_models.settings(64, 64, 4)
    assert model.lead_rank_components == ("image_encoder",)
    roomy = fitting(model, card(32 * GB, "cpu-fp32")).fit(settings)
    stages: dict[str, tuple[int, int]] = {}
    for each in roomy.components:
        times = 1 if each.name == "image_encoder" else 3
        held, working = stages.get(stage or each.stage, (0, 0))
        held += each.weight_bytes * times
        stages[stage or each.stage] = held, max(working, each.working_bytes * times)
    needs = max(map(sum, stages.values()))
    for memory, holds in ((needs + 10, True), (needs - 10, False)):
        asked = replace(fitting(model, card(int(memory / 0.92), "cpu-fp32")), copies=3)
        parts = [asked.planner.plan_named(each.name, settings) for each in roomy.components]
        if stage is not None:
            parts = [replace(each, plan=replace(each.plan, stage=stage)) for each in parts]
        assert asked._fit_together(parts) is holds


def together(stage: str, *parts: tuple[str, int, int]) -> list[ComponentPlan]:
    """Components of one stage: name, bytes of weights, bytes beside them."""
    wide = Precision("float32", "float32")
    return [
        ComponentPlan(name, name, stage, "", 1, "cpu", wide, weights, working)
        for name, weights, working in parts
    ]


def test_parts_that_share_a_stage_are_there_as_often_as_ranks_hold_them() -> None:
    plans = together("a", ("encoder", 100, 50), ("vae", 10, 30), ("denoiser", 20, 5))
    assert peak_of(plans) == 130 + 50
    # Once the encoder, three times the others; the decoder works on all three.
    assert peak_of(plans, {"vae": 3, "denoiser": 3}) == 100 + 3 * 30 + 3 * 30
    assert peak_of([*plans, *together("b", ("other", 90, 10))], {"other": 4}) == 400


def test_savings_come_one_after_the_other() -> None:
    model, settings = config_only_models.svd(), config_only_models.settings(64, 64, 8)
    roomy = fitting(model, CARD).fit(settings)
    unet, vae = part(roomy, "unet"), part(roomy, "vae")
    fits = []
    for share in (1.05, 0.8, 0.5):
        tight = fitting(model, card(int(max(unet.peak_bytes, vae.peak_bytes) * share / 0.92)))
        fits.append(tight.fit(settings))
    assert fits[0].changes == ()
    assert fits[1].settings.option("decode_chunk_size") < 8
    # What shows in the picture is kept as small as it can be: weights wait before there is more.
    assert not part(fits[1], "vae").block_offload
    assert part(fits[2], "vae").block_offload
    chunks = [fitted.settings.option("decode_chunk_size") for fitted in fits]
    assert chunks[0] > chunks[1] >= chunks[2]
    assert any("decoded" in line and "changes the picture" in line for line in fits[1].changes)
    assert all(fitted.fits for fitted in fits)
    # What was asked for by name is not changed.
    asked = config_only_models.svd(options=SVDOptions(decode_chunk_size=8))
    kept = fitting(asked, card(int(vae.peak_bytes * 0.5 / 0.92))).fit(settings)
    assert not kept.fits
    assert kept.settings.option("decode_chunk_size") == 8


def test_a_picture_is_encoded_in_tiles_only_where_encoding_is_too_large() -> None:
    """Decoding takes more than encoding of the same size, so it is in tiles before."""
    model, settings = config_only_models.svd(), config_only_models.settings(512, 512, 1)
    whole = fitting(model, CARD)
    vae = whole.planner.plan_named("vae", settings)
    encoding, decoding = (vae.in_stage(stage)[0] for stage in ("given frames", "decode"))
    assert encoding < decoding
    between = fitting(model, card(int((encoding + decoding) / 2 / 0.92))).fit(settings)
    assert between.fits
    assert between.settings.saving(tiling.DECODE, 0) == 32
    assert not between.settings.saving(tiling.ENCODE, 0)
    assert part(between, "vae").peak_bytes >= encoding, "its picture is still encoded as a whole"
    less = fitting(model, card(int(encoding * 0.8 / 0.92))).fit(settings)
    assert less.fits
    assert less.settings.saving(tiling.ENCODE, 0) == 32
    (line,) = [line for line in less.changes if "given frames are encoded" in line]
    assert "in 9 tiles" in line
    assert "lossy" in line
    assert part(less, "vae").peak_bytes < encoding


def test_weights_wait_on_the_host_where_nothing_else_helps() -> None:
    model = config_only_models.opensora("1.2", hidden_size=512, num_heads=4, depth=4)
    settings = config_only_models.settings(32, 32, 1, guidance=1.0)
    roomy = part(fitting(model, CARD).fit(settings), "denoiser")
    assert roomy.weight_bytes > 5 * roomy.working_bytes
    device = card(int(roomy.peak_bytes * 0.5 / 0.92))
    fitted = fitting(model, device).fit(settings)
    denoiser = part(fitted, "denoiser")
    assert fitted.fits
    assert denoiser.block_offload
    assert denoiser.resident_bytes < denoiser.weight_bytes / 3
    assert any("block by block" in line for line in fitted.changes)
    # The host must have room for what waits there.
    assert fitted.host_bytes > denoiser.weight_bytes
    tight = fitting(model, device, host_memory=denoiser.weight_bytes // 2).fit(settings)
    # Where it has none, they are read from their files again and again.
    assert tight.fits
    assert next(part for part in tight.components if part.name == "denoiser").from_disk
    assert tight.host_bytes < denoiser.weight_bytes // 2
    assert any("read from their files" in line for line in tight.changes)
    # A CPU's memory is the host's: nothing is won there.
    cpu = replace(device, kind="cpu", index=None)
    assert not any(each.block_offload for each in fitting(model, cpu).fit(settings).components)


def test_the_largest_that_fits_is_found_by_halving() -> None:
    model, settings = config_only_models.svd(), config_only_models.settings(128, 128, 16)
    options = SVDOptions(decode_chunk_size=16)
    model = config_only_models.svd(options=options)
    need = max(each.peak_bytes for each in fitting(model, CARD).fit(settings).components)
    tight = fitting(model, card(need // 3))
    assert not tight.fit(settings).fits
    largest = tight.largest(settings)
    assert largest is not None
    assert largest.fits
    # The next larger one does not fit.
    candidates = list(model.smaller(settings))
    place = next(
        i for i, each in enumerate(candidates)
        if (each.height, each.width, each.num_frames)
        == (largest.settings.height, largest.settings.width, largest.settings.num_frames)
    )  # fmt: skip
    assert place == 0 or not tight.fit(candidates[place - 1]).fits
    assert fitting(model, card(1000)).largest(settings) is None


@pytest.mark.slow
def test_what_is_far_too_large_is_reported_after_few_dry_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is needed says about where the largest is; more frames may need more than pixels."""
    options = SVDOptions(decode_chunk_size=64)
    model, settings = (
        config_only_models.svd(options=options),
        config_only_models.settings(2048, 2048, 64),
    )
    tight = fitting(model, card(10**8))
    tried: set[object] = set()

    def counted(stage_call: DryRunCall, *others: Any) -> DryRun | str:
        tried.add((stage_call.key, stage_call.component))
        return dry_run(stage_call, *others)

    monkeypatch.setattr(component_precision, "dry_run", counted)
    assert not tight.fit(settings).fits
    largest = tight.largest(settings)
    assert largest is not None
    assert largest.fits
    size = largest.settings
    assert size.width * size.height * size.num_frames > 2_000_000, (
        "of 2 frames, not of 4 small ones"
    )
    assert len(tried) <= 32, "of 100 that are smaller"


def test_weights_that_are_too_much_are_refused_without_a_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a CPU nothing helps there, so each stage is run dry once, and no smaller video."""
    tried: list[str] = []

    def counted(stage_call: DryRunCall, *others: Any) -> DryRun | str:
        tried.append(stage_call.stage)
        return dry_run(stage_call, *others)

    monkeypatch.setattr(component_precision, "dry_run", counted)
    model, settings = config_only_models.svd(), config_only_models.settings(128, 128, 8)
    host = find_profile("cpu-fp32").machine().cpu
    tight = fitting(model, replace(host, free_memory=10**5))
    assert not tight.fit(settings).fits
    assert tried == ["image", "given frames", "decode", "denoise"]
    assert tight.largest(settings) is None
    assert len(tried) == 4


def test_a_limit_is_no_more_than_there_is() -> None:
    assert with_memory_limit(CARD, 8 * GB).free_memory == 8 * GB
    assert with_memory_limit(CARD, None) is CARD
    assert with_memory_limit(CARD, 999 * GB) is CARD


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GB", 8 * GB), ("7.5 GiB", int(7.5 * 2**30)), ("500mb", 500 * 10**6), ("1024", 1024),
     ("8g", 8 * GB)],
)  # fmt: skip
def test_amounts_as_they_are_written(text: str, size: int) -> None:
    assert parse_bytes(text, "max_memory") == size


@pytest.mark.parametrize("text", ["much", "8 parsecs", "-1GB", "0", ""])
def test_what_is_no_amount(text: str) -> None:
    with pytest.raises(InputError, match=r"max_memory must be"):
        parse_bytes(text, "max_memory")


def released_svd() -> Any:
    model = config_only_models.svd()
    return replace(model, builder=SVDBuilder(SVDConfig.from_json("released", released())))


def released_opensora() -> Any:
    model = config_only_models.opensora("1.2")
    config = OpenSoraConfig("1.2", STDiT3Config(), VideoVAEConfig(), T5_XXL)
    return replace(model, builder=OpenSoraBuilder(config))


def test_svd_fits_into_8_gb() -> None:
    settings = config_only_models.settings(576, 1024, 14)
    fitted = fitting(released_svd(), card(8 * GB)).fit(settings)
    assert fitted.fits, fitted.changes
    assert max(each.peak_bytes for each in fitted.components) < 8 * GB * 0.92
    assert fitted.settings.height == 576
    assert fitted.settings.num_frames == 14
    assert any("decoded" in line for line in fitted.changes)


def test_opensora_1_2_at_360p_fits_into_8_gb() -> None:
    settings = config_only_models.settings(360, 640, 51, guidance=7.0)
    fitted = fitting(released_opensora(), card(8 * GB)).fit(settings)
    assert fitted.fits, fitted.changes
    # T5 XXL alone has 9.5 GB of weights.
    text = part(fitted, "text_encoder")
    assert text.weight_bytes > 9 * GB
    assert text.block_offload
    assert text.peak_bytes < 3 * GB


@pytest.mark.slow
def test_exact_ways_come_before_tiles_which_are_taken_where_these_are_not_enough() -> None:
    """SVD at its released size: the decoder on 4 GB, and on 2.4 GB, which the UNet exceeds."""
    model, settings = released_svd(), config_only_models.settings(576, 1024, 14)

    def vae(memory: int) -> tuple[Any, Any]:
        fitted = fitting(model, card(memory)).fit(settings)
        decoder = part(fitted, "vae")
        assert decoder.peak_bytes < memory, fitted.changes
        return [line for line in fitted.changes if "tiles" in line], decoder

    tiled, whole = vae(4 * GB)
    assert not tiled
    (line,), cut = vae(int(2.4 * GB))
    assert line.startswith("video autoencoder: frames are decoded in 6 tiles that overlap")
    assert "lossy" in line
    assert not cut.block_offload  # its weights are little beside what it works with
    assert cut.working_bytes < 0.7 * whole.working_bytes


def test_the_largest_that_fits_is_named_with_the_options_that_it_takes() -> None:
    """Sixteen frames at once need too much, and one at once of the same video does not."""
    model, device = config_only_models.inpaint(9), card(60_000_000)
    settings = config_only_models.settings(256, 256, 16, options={"frames_at_once": 16})
    fitted = fitting(model, device).fit(settings)
    asked = replace(plan(), settings=settings, device=device, components=fitted.components)
    machine = find_profile("cuda-sm86").machine()
    reason = infeasible_reason(Request(), asked, fitting(model, device), fitted, machine)
    assert reason is not None
    assert reason.endswith("(--size 256x256 --num-frames 16 --frames-at-once 1)")
