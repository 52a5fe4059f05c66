"""Every family in the plan of every profile, without its hardware: no clash, and islands hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from everyframe.core.facts import DeviceFacts, OpShape, Throughput
from everyframe.core.plan import FLOAT32, ComponentPlan, Precision, Settings
from everyframe.dry_run import executor
from everyframe.dry_run.result import Work
from everyframe.hardware.profiles import find_profile, profile_names
from everyframe.planning import dry_runs
from everyframe.planning.dry_runs import DryRun, call_seconds, dry_run, heaviest
from everyframe.precision.policy import choose
from everyframe.runtime.interface import DryRunSpec
from helpers import config_only_models
from helpers.diagonals import diagonal
from helpers.dry_runs import dry_run_call
from helpers.slow_rows import slow_unless

MODELS = config_only_models.all_models()
SETTINGS = {
    "opensora-1.0": config_only_models.settings(32, 32, 16),
    "opensora-1.2": config_only_models.settings(64, 64, 17),
    "opensora2": config_only_models.settings(
        48, 32, 9, given_frames=("first_frame",), options={"first_frame": "flux"}
    ),
    "opensora2-dcae": config_only_models.settings(32, 64, 8),
    "svd": config_only_models.settings(64, 64, 4),
    "inpaint-9": config_only_models.settings(64, 48, 4),
    "inpaint-4": config_only_models.settings(56, 64, 4),
    "stepvideo": config_only_models.settings(32, 48, 18),
}
NARROW = {"float16", "bfloat16"}


def device(profile: str) -> DeviceFacts:
    return find_profile(profile).machine().devices[0]


#: Settings with which no dry run may differ unless its key does, too.
OTHERS: dict[str, Any] = {
    "negative_prompt": "a",
    "num_inference_steps": 9,
    "fps": 12.0,
    "seed": 5,
    "edit_strength": 0.5,
}


def runs_of(
    model: Any, settings: Settings, facts: DeviceFacts, dtype: str = "auto"
) -> dict[str, DryRun]:
    """Each stage dry, in the policy that a model of the real size would have there."""
    precisions = {}
    for part in model.components(settings):
        real = replace(part.needs, num_parameters=10**9)
        precisions[part.name], _ = choose(facts, dtype, real, force=True)
    found = {}
    for each in model.dry_run_calls(settings):
        run = dry_run(each, {name: precisions[name] for name in each.components}, facts)
        assert isinstance(run, DryRun)
        found[each.stage] = run
    return found


@pytest.mark.parametrize(
    "name",
    # One of three families each; the others take two to four seconds apiece.
    slow_unless(("opensora-1.2", "svd", "opensora2-dcae"), MODELS),
)
def test_calls_of_equal_keys_have_equal_results(name: str) -> None:
    """Whichever of them is run dry first is the answer for all."""
    model, facts = MODELS[name], device("cuda-sm90")

    def results(settings: Settings) -> dict[Any, Any]:
        found = {}
        for each in model.dry_run_calls(settings):
            precisions = dict.fromkeys(each.components, Precision("bfloat16", "bfloat16", ()))
            run = executor.dry_run(each, precisions, facts).found[each.component]
            found[each.key, each.component] = run
        return found

    usual = results(SETTINGS[name])
    for option, value in OTHERS.items():
        others = results(replace(SETTINGS[name], **{option: value}))
        same = usual.keys() & others.keys()
        assert same
        assert {key: others[key] for key in same} == {key: usual[key] for key in same}, option


#: One of each kind of device. The other cards have the dtypes and rules of one of these: one family
#: is run dry on each of them always, each other one on two kinds in its turn, and all with
#: ``--slow``.
KINDS = ("cpu-fp32", "cpu-bf16", "cuda-sm70", "cuda-sm90", "mps", "rocm")


def pairs() -> list[Any]:
    """Every family and profile."""
    fast = {
        (name, KINDS[(2 * turn + more) % len(KINDS)])
        for turn, name in enumerate(MODELS)
        for more in (0, 1)
    }
    return [
        pytest.param(
            name,
            profile,
            marks=() if name == "opensora-1.2" or (name, profile) in fast else pytest.mark.slow,
        )
        for name in MODELS
        for profile in profile_names()
    ]


def test_each_kind_of_device_is_among_them() -> None:
    def rules(profile: str) -> tuple[Any, ...]:
        facts = device(profile)
        return (facts.kind, facts.capability is None, facts.dtypes, facts.has_fast_bf16,
                facts.has_fast_fp16, facts.max_array_bytes)  # fmt: skip

    assert {rules(profile) for profile in profile_names()} == {rules(kind) for kind in KINDS}


@pytest.mark.parametrize(("name", "profile"), pairs())
def test_every_family_runs_dry_in_every_profile(name: str, profile: str) -> None:
    facts = device(profile)
    runs = runs_of(MODELS[name], SETTINGS[name], facts)
    assert {run: run_.found.findings for run, run_ in runs.items() if run_.found.findings} == {}
    # It did run, and in what the policy says.
    assert all(run.found.num_operations > 20 for run in runs.values())
    dtypes = {dtype for run in runs.values() for _, _, dtype in run.found.seen}
    auto = {"cpu-fp32": set(), "cuda-sm70": {"float16"}, "cuda-sm75": {"float16"},
            "mps": {"float16"}}.get(profile, {"bfloat16"})  # fmt: skip
    assert dtypes & NARROW == auto


@pytest.mark.parametrize(("name", "dtype"), diagonal(MODELS, ["float16", "bfloat16", "float32"]))
def test_a_dtype_that_was_asked_for_has_no_clash_either(name: str, dtype: str) -> None:
    runs = runs_of(MODELS[name], SETTINGS[name], device("cuda-sm90"), dtype)
    assert [line for run in runs.values() for line in run.clashes()] == []


@pytest.mark.parametrize(
    # A version of each family: the others have the same modules around their blocks.
    "name",
    slow_unless({*MODELS} - {"opensora2", "inpaint-9"}, MODELS),
)
def test_what_steers_everything_is_float32_where_products_are_not(name: str) -> None:
    for profile in ("cuda-sm70", "cuda-sm90", "cpu-bf16"):
        runs = runs_of(MODELS[name], SETTINGS[name], device(profile))
        found = runs["denoise"].found
        # Parameters are narrow; what counts is where numbers are made of them.
        copies = ("aten::_to_copy", "aten::copy_", "aten::clone", "aten::cat")
        narrow_places = {m for m, op, dtype in found.seen if dtype in NARROW and op not in copies}
        assert narrow_places, "some products are narrow"
        # Timesteps, guidance and the sampler are around the model: no module is running.
        steered = {"", "t_embedder", "t_embedder.sinusoid", "fps_embedder.sinusoid", "rope",
                   "time_proj", "add_time_proj", "x_embedder", "final_layer", "pos_embed",
                   "adaln_single", "proj_out"}  # fmt: skip
        # svd's UNet walks through its blocks itself: what these compute counts for no module.
        assert not narrow_places & (steered - {""} if name == "svd" else steered)
        for module, operation, dtype in found.seen:
            last = module.rpartition(".")[2]
            if (
                last
                in (
                    "modulation",
                    "modulate",
                    "modulate1",
                    "modulate2",
                    "sinusoid",
                    "norm1",
                    "norm2",
                    "norm_final",
                )
                and name != "svd"
                and operation not in copies
            ):
                assert dtype not in NARROW, (module, operation)
            if operation in ("aten::exp", "aten::cos", "aten::sin", "aten::pow", "aten::log"):
                assert dtype not in NARROW, (module, operation)


@pytest.mark.parametrize("name", MODELS)
def test_islands_of_the_plan_compute_in_float32(name: str) -> None:
    model, settings = MODELS[name], SETTINGS[name]
    needs = {part.name: part.needs for part in model.components(settings)}
    runs = runs_of(model, settings, device("cuda-sm90"))
    for run in runs.values():
        for island in needs[run.stage_call.component].islands:
            dtypes = {
                dtype
                for module, operation, dtype in run.found.seen
                if operation in ("aten::addmm", "aten::mm", "aten::convolution")
                and module and rules_in(module, island)
            }  # fmt: skip
            assert not dtypes & NARROW, (island, dtypes)


def rules_in(module: str, island: str) -> bool:
    from everyframe.precision.islands import is_in_island

    return is_in_island(module, (island,))


@pytest.mark.parametrize("name", ["opensora-1.2", "svd"])
def test_an_autoencoder_decodes_in_float32_on_every_device(name: str) -> None:
    for profile in ("cuda-sm70", "cuda-sm90", "mps"):
        runs = runs_of(MODELS[name], SETTINGS[name], device(profile))
        decoded = {dtype for _, _, dtype in runs["decode"].found.seen}
        assert not decoded & NARROW
    # The checkpoint's word (force_upcast) stands against --dtype fp16 too.
    asked = runs_of(MODELS["svd"], SETTINGS["svd"], device("cuda-sm70"), "float16")
    assert not {dtype for _, _, dtype in asked["decode"].found.seen} & NARROW


def test_a_forced_upcast_that_is_undone_is_found() -> None:
    """diffusers casts SVD's autoencoder back to fp16 before decoding: float32 latents meet it."""
    stage_call = MODELS["svd"].dry_run_calls(SETTINGS["svd"])[3]
    module = stage_call.module().half()
    found = executor.dry_run(stage_call, {"vae": None}, device("cuda-sm70")).found["vae"]
    last = found.findings[-1]
    assert (last.module, last.operation, last.is_fatal) == ("decoder.conv_in", "conv2d", True)
    assert "should be the same" in last.problem
    module.float()


def test_given_frames_and_guidance_off_are_run_dry_too() -> None:
    given = replace(SETTINGS["opensora-1.2"], given_frames=("image",))
    runs = runs_of(MODELS["opensora-1.2"], given, device("cuda-sm75"))
    assert list(runs) == ["text", "given frames", "denoise", "decode"]
    plain = replace(SETTINGS["opensora-1.2"], guidance_scale=1.0)
    alone = runs_of(MODELS["opensora-1.2"], plain, device("cuda-sm75"))
    assert not any(run.found.findings for run in (*runs.values(), *alone.values()))
    work = [each["denoise"].found.work.operations for each in (alone, runs)]
    assert work[1] > 1.8 * work[0]


def test_every_family_can_be_run_dry() -> None:
    assert all(isinstance(model, DryRunSpec) for model in MODELS.values())


def test_a_run_is_done_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_runs, "_DONE", {})
    stage_call = MODELS["svd"].dry_run_calls(SETTINGS["svd"])[0]
    precision = Precision("float32", "float32")
    card = device("cuda-sm80")
    one = dry_run_call(stage_call, precision, card)
    # Another card of the same rules, with another memory.
    assert dry_run_call(stage_call, precision, replace(card, free_memory=1)).found is one.found
    assert dry_run_call(stage_call, precision, device("mps")).found is not one.found


MM = OpShape("product", "float32", ((64, 64), (64, 64)))
OTHER = replace(MM, shapes=((8, 8), (8, 8)))
ATTENTION = OpShape("attention", "bfloat16", ((1, 1, 8, 8),) * 3)


MODELS_RUN = dry_run_call(
    MODELS["svd"].dry_run_calls(SETTINGS["svd"])[0],
    Precision("float32", "float32"),
    device("cuda-sm80"),
)


def test_seconds_are_work_over_rates() -> None:
    rates = Throughput((("float32", 1e9), ("bfloat16", 4e9)), 1e10, 1e9, "made up", launch=1e-6)
    work = Work(((MM, 3e9), (ATTENTION, 8e9)), moved_bytes=5 * 10**9, num_kernels=1000)
    assert call_seconds(work, rates) == pytest.approx(3 + 2 + 0.5 + 0.001)
    # What was tried counts, and stands for others of its kind.
    tried = replace(rates, measured=((MM, 2e9),))
    assert call_seconds(work, tried) == pytest.approx(1.5 + 2 + 0.5 + 0.001)
    assert call_seconds(Work(((OTHER, 2e9),)), tried) == pytest.approx(1)
    # Large results are handed out by the system, which takes time of its own.
    mapped = replace(work, mapped_bytes=10**9)
    slow = replace(rates, mapping=5e8)
    assert call_seconds(mapped, slow) - call_seconds(work, slow) == pytest.approx(2)
    assert call_seconds(mapped, rates) == call_seconds(work, rates)


def test_attention_takes_the_time_of_the_kernel_that_is_used() -> None:
    plain = replace(ATTENTION, parameters=("math",))
    rates = Throughput((("bfloat16", 4e9),), 1e10, 1e9, "made up", measured=((plain, 1e9),))
    work = Work(((ATTENTION, 8e9),))
    assert call_seconds(work, rates, paths=()) == pytest.approx(8)
    # The other kernel was not tried: the plain one stands for it, as one of its kind.
    flash = replace(rates, measured=(*rates.measured, (replace(plain, parameters=("flash",)), 8e9)))
    assert call_seconds(work, flash, paths=("linear-gelu", "attention-flash")) == pytest.approx(1)
    # Whoever measures asks for the kernels of the plan.
    found = replace(MODELS_RUN.found, work=work)
    run = DryRun(MODELS_RUN.stage_call, found)
    component = run.stage_call.component
    assert heaviest([run], 1, {component: ()}) == [plain]
    assert heaviest([run], 1, {component: None}) == [ATTENTION]


def test_what_is_tried_is_what_takes_longest_and_one_of_each_kind() -> None:
    stage_call = MODELS["svd"].dry_run_calls(SETTINGS["svd"])[0]

    def run(products: Any, num_calls: float) -> DryRun:
        found = dry_run_call(stage_call, Precision("float32", "float32"), device("cuda-sm80")).found
        return DryRun(replace(stage_call, num_calls=num_calls), replace(found, work=Work(products)))

    runs = [run(((MM, 1e9), (OTHER, 2e9)), 1), run(((MM, 1e9), (ATTENTION, 1e6)), 5)]
    assert heaviest(runs, 1) == [MM, ATTENTION]
    assert heaviest(runs, 3) == [MM, ATTENTION, OTHER]


@pytest.mark.parametrize("at_once", [1, 2])
def test_offloaded_weights_are_copied_in_each_pass(at_once: int) -> None:
    """Guidance branches one after the other bring the weights to the device twice a step."""
    model = MODELS["stepvideo"]
    settings = config_only_models.settings(32, 48, 18, guidance=9.0)
    settings = settings.with_saving("branches_at_once", at_once)
    call = next(each for each in model.dry_run_calls(settings) if each.component == "denoiser")
    run = dry_run_call(call, FLOAT32, device("cuda-sm89"))
    num_bytes = 10**12  # the copies take longer than the computation
    part = ComponentPlan(
        "denoiser", "", "denoise", "", 1, "cuda", FLOAT32, num_bytes, 1, block_offload=True
    )
    rates = Throughput((("float32", 1e15),), 1e15, 1e18, "")
    seconds = dry_runs.stage_plan(run, part, rates).seconds
    passes = call.num_calls * 2 / at_once
    assert seconds == pytest.approx(passes * num_bytes / dry_runs._BUS, rel=1e-3)
