"""Strict loading: equal to `load_state_dict(strict=True)`, every fault named, memory taken once."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from everyframe.checkpoints.key_map import KeyMap
from everyframe.checkpoints.strict_load import load_strictly
from everyframe.checkpoints.tensor_file import TensorFile, open_checkpoint
from everyframe.core.errors import CheckpointError
from everyframe.hardware.isolation import run_isolated

State = dict[str, torch.Tensor]


class Small(nn.Module):
    """Parameters, a persistent buffer, a computed one, and a child."""

    freqs: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("freqs", torch.empty(5), persistent=False)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        self.freqs = torch.arange(5.0)


def reference_state() -> State:
    generator = torch.Generator().manual_seed(1)
    state = Small().state_dict()
    return {
        name: torch.randn(value.shape, generator=generator)
        if value.is_floating_point()
        else torch.tensor(11)
        for name, value in state.items()
    }


def saved(tmp_path: Path, state: State) -> TensorFile:
    path = tmp_path / "model.safetensors"
    save_file(state, path)
    return open_checkpoint(path)


def on_meta() -> Small:
    with torch.device("meta"):
        return Small()


@pytest.mark.parametrize("meta", [True, False])
def test_equals_torchs_own_strict_loading(tmp_path: Path, meta: bool) -> None:
    state = reference_state()
    module = on_meta() if meta else Small()
    load_strictly(module, saved(tmp_path, state))
    reference = Small()
    reference.load_state_dict(state, strict=True)
    for name, value in reference.state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name
    assert torch.equal(module.freqs, torch.arange(5.0))
    assert not any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()])
    x = torch.randn(2, 3)
    assert torch.equal(module.child(x), reference.child(x))


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    state = reference_state()
    del state["child.bias"]
    with pytest.raises(CheckpointError, match=r"lacks 1 tensor: 'child.bias'"):
        load_strictly(on_meta(), saved(tmp_path, state))


def test_extra_tensor_is_named(tmp_path: Path) -> None:
    state = reference_state() | {"other": torch.ones(1)}
    with pytest.raises(CheckpointError, match=r"has 1 tensor too many: 'other'"):
        load_strictly(on_meta(), saved(tmp_path, state))


def test_a_probable_rename_is_suggested(tmp_path: Path) -> None:
    state = reference_state()
    state["child.wait"] = state.pop("child.weight")
    with pytest.raises(CheckpointError, match=r"'child.weight'; did you mean 'child.wait'"):
        load_strictly(on_meta(), saved(tmp_path, state))


def test_misshapen_tensor_is_named_and_nothing_is_touched(tmp_path: Path) -> None:
    state = reference_state()
    state["child.weight"] = torch.randn(4, 2)
    module = Small()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"'child.weight' has shape \(4, 2\), expected"):
        load_strictly(module, saved(tmp_path, state))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_another_kind_is_refused(tmp_path: Path) -> None:
    state = reference_state()
    state["child.bias"] = torch.ones(4, dtype=torch.int64)
    with pytest.raises(CheckpointError, match=r"'child.bias' has dtype torch.int64"):
        load_strictly(on_meta(), saved(tmp_path, state))


def test_renames_and_ignored_names(tmp_path: Path) -> None:
    state = {f"model.{name}": value for name, value in reference_state().items()}
    state["pos_embed"] = torch.ones(2)
    keys = KeyMap(rename=((r"^model\.", ""),), ignore=(r"pos_embed(_temporal)?",))
    module = on_meta()
    load_strictly(module, saved(tmp_path, state), keys=keys)
    assert torch.equal(module.child.weight, state["model.child.weight"])
    # Ignored means the whole name: a part of it is not enough.
    with pytest.raises(CheckpointError, match=r"too many: 'pos_embed'"):
        load_strictly(
            on_meta(),
            saved(tmp_path, state),
            keys=KeyMap(rename=keys.rename, ignore=(r"pos",)),
        )


def test_two_tensors_for_one_place(tmp_path: Path) -> None:
    state = reference_state()
    state["old.child.bias"] = torch.ones(4)
    with pytest.raises(CheckpointError, match=r"are both for 'child.bias'"):
        load_strictly(on_meta(), saved(tmp_path, state), keys=KeyMap(rename=((r"^old\.", ""),)))


def test_dtype_for_all_and_by_rule(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, reference_state())
    module = on_meta()
    load_strictly(module, checkpoint, dtype=torch.bfloat16)
    assert module.child.weight.dtype == torch.bfloat16
    assert module.norm.num_batches_tracked is not None
    assert module.norm.num_batches_tracked.dtype == torch.int64
    module = on_meta()
    load_strictly(
        module,
        checkpoint,
        dtype=lambda name, own: own if name.startswith("norm") else torch.float16,
    )
    assert module.child.weight.dtype == torch.float16
    assert module.norm.weight.dtype == torch.float32


def test_a_stored_half_is_widened_to_the_modules_dtype(tmp_path: Path) -> None:
    state = reference_state()
    state["child.weight"] = state["child.weight"].to(torch.bfloat16)
    module = on_meta()
    load_strictly(module, saved(tmp_path, state))
    assert module.child.weight.dtype == torch.float32
    assert torch.equal(module.child.weight, state["child.weight"].float())


class Tied(nn.Module):
    def __init__(self, *, already: bool) -> None:
        super().__init__()
        self.shared = nn.Embedding(4, 3)
        self.embed = nn.Embedding(4, 3)
        if already:
            self.embed.weight = self.shared.weight


TIED = KeyMap(tied=(("shared.weight", "embed.weight"),))


@pytest.mark.parametrize("already", [True, False])
@pytest.mark.parametrize("name", ["shared.weight", "embed.weight"])
def test_tied_weights_stay_one_parameter(tmp_path: Path, already: bool, name: str) -> None:
    weight = torch.randn(4, 3)
    with torch.device("meta"):
        module = Tied(already=already)
    load_strictly(module, saved(tmp_path, {name: weight}), keys=KeyMap() if already else TIED)
    assert module.shared.weight is module.embed.weight
    assert torch.equal(module.shared.weight, weight)


def test_tied_weights_that_differ_are_refused(tmp_path: Path) -> None:
    weight = torch.randn(4, 3)
    both = {"shared.weight": weight, "embed.weight": weight.clone()}
    with torch.device("meta"):
        module = Tied(already=False)
    load_strictly(module, saved(tmp_path, both), keys=TIED)
    both["embed.weight"] = weight + 1
    with pytest.raises(CheckpointError, match=r"tied to, but differs"):
        load_strictly(module, saved(tmp_path, both), keys=TIED)


def test_untied_weights_must_both_be_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"lacks 1 tensor: 'embed.weight'"):
        load_strictly(Tied(already=False), saved(tmp_path, {"shared.weight": torch.ones(4, 3)}))


class Forgetful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(3.0), persistent=False)


def test_a_buffer_left_on_meta_is_an_error(tmp_path: Path) -> None:
    with torch.device("meta"):
        module = nn.ModuleDict({"inner": Forgetful(), "linear": nn.Linear(1, 1)})
    state = {"linear.weight": torch.ones(1, 1), "linear.bias": torch.ones(1)}
    with pytest.raises(AssertionError, match=r"'inner.table'.*reset_buffers"):
        load_strictly(module, saved(tmp_path, state))


def test_transformers_t5_and_diffusers_autoencoder(tmp_path: Path) -> None:
    """The two foreign modules that every real checkpoint brings along."""
    from diffusers import AutoencoderKL
    from transformers import T5Config, T5EncoderModel

    config = T5Config(d_model=8, d_ff=16, d_kv=4, num_heads=2, num_layers=2, vocab_size=20)
    for build in (
        lambda: T5EncoderModel(config),
        lambda: AutoencoderKL(block_out_channels=(8,), norm_num_groups=4),
    ):
        reference = build().eval()
        path = tmp_path / type(reference).__name__
        reference.save_pretrained(path)
        with torch.device("meta"):
            module = build().eval()
        keys = KeyMap(tied=(("shared.weight", "encoder.embed_tokens.weight"),))
        load_strictly(module, open_checkpoint(path), keys=keys)
        if isinstance(reference, T5EncoderModel):
            x = torch.tensor([[3, 5, 1]])
            assert torch.equal(module(x).last_hidden_state, reference(x).last_hidden_state)
        else:
            x = torch.randn(1, 3, 8, 8)
            assert torch.equal(module(x).sample, reference(x).sample)


def layers() -> nn.Module:
    return nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(16)])


def peak_share(path: str, tiny: str) -> float:
    """The most that loading the layers takes in this process, in sizes of the layers."""
    # Everything that is imported or set up on first use is paid for by a tiny load before.
    first = nn.Linear(2, 2)
    torch.save(first.state_dict(), tiny)
    load_strictly(first, open_checkpoint(tiny))
    gc.collect()
    process = psutil.Process()
    base = peak = process.memory_info().rss
    done = False

    def watch() -> None:
        nonlocal peak
        while not done:
            peak = max(peak, process.memory_info().rss)
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    with torch.device("meta"):
        module = layers()
    load_strictly(module, open_checkpoint(path))
    done = True
    thread.join()
    peak = max(peak, process.memory_info().rss)
    return (peak - base) / sum(each.nbytes for each in module.parameters())


def test_peak_memory_is_the_module_once(tmp_path: Path) -> None:
    """67 MB in 16 tensors: once the module, and one tensor (6 %) more. Twice would be 2.0."""
    paths = [str(tmp_path / f"model{suffix}") for suffix in (".safetensors", ".pth")]
    state = {f"{layer}.weight": torch.full((1024, 1024), float(layer)) for layer in range(16)}
    save_file(state, paths[0])
    torch.save(state, paths[1])
    # Each in a process of its own, with nothing of the other's left to use again.
    for path in paths:
        ended = run_isolated(peak_share, path, str(tmp_path / "tiny.pth"), seconds=300)
        assert ended.is_well, f"{ended}: {ended.printed}"
        assert 0.9 < ended.value < 1.3
