"""Cards that are not here: a made-up torch.cuda, and nvidia-smi's text."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from everyframe.core.errors import DeviceLostError
from everyframe.hardware import accelerators

GIB = 1 << 30
UUID = "01234567-89ab-cdef-0123-456789abcdef"


@pytest.mark.parametrize(
    ("capability", "bf16", "fp16"),
    [
        ((6, 1), False, False),
        ((7, 0), False, True),  # V100: is_bf16_supported() says yes of it
        ((7, 5), False, True),  # T4: the same
        ((8, 0), True, True),
        ((12, 0), True, True),
    ],
)
def test_what_a_capability_has(capability: tuple[int, int], bf16: bool, fp16: bool) -> None:
    assert accelerators.has_fast_bf16(capability) is bf16
    assert accelerators.has_fast_fp16(capability) is fp16


@pytest.mark.parametrize(
    ("version", "may"),
    [("2.13.0+cpu", False), ("", False), ("2.13.0", True), ("2.13.0+cu130", True)],
)
def test_wheels_for_the_cpu_need_no_look(version: str, may: bool) -> None:
    assert accelerators.may_have_any(version) is may


def test_nvidia_smi_lines() -> None:
    text = f"GPU-{UUID}, 7000\nGPU-unknown, [N/A]\n"
    assert accelerators._parse_free(text) == {UUID: 7000 << 20}


@pytest.fixture
def v100(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    card = SimpleNamespace(
        name="V100", total_memory=16 * GIB, major=7, minor=0, uuid=UUID,
        multi_processor_count=80, max_threads_per_multi_processor=2048,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *a, **k: True)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda index: False, raising=False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


def test_a_card_that_is_broken_is_named(v100: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def broken(index: int) -> None:
        raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")

    monkeypatch.setattr(torch.cuda, "get_device_properties", broken)
    with pytest.raises(DeviceLostError, match=r"cuda:0 was lost before it was used .*-q -d ECC"):
        accelerators.accelerator_facts()


def test_free_memory_comes_without_a_context(v100: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def makes_a_context(index: int) -> tuple[int, int]:
        raise AssertionError("asked the driver although nvidia-smi had answered")

    monkeypatch.setattr(accelerators, "_free_by_uuid", lambda: {UUID: 9 * GIB})
    monkeypatch.setattr(torch.cuda, "mem_get_info", makes_a_context)
    (device,) = accelerators.accelerator_facts()
    assert (device.torch_name, device.capability) == ("cuda:0", (7, 0))
    # 613 MB and 163,840 stacks are left to the context that this process will have.
    assert (device.memory, device.free_memory) == (16 * GIB, 9 * GIB - 613_000_000 - 167_772_160)
    assert device.has_fast_fp16
    assert not device.has_fast_bf16  # by capability, not by is_bf16_supported()


def test_a_context_that_is_there_takes_nothing_more(
    v100: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(accelerators, "_free_by_uuid", lambda: {UUID: 9 * GIB})
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda index: True, raising=False)
    assert accelerators.accelerator_facts()[0].free_memory == 9 * GIB


def test_a_card_without_room_for_a_context_has_nothing_free(
    v100: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerators, "_free_by_uuid", lambda: {UUID: GIB // 4})
    assert accelerators.accelerator_facts()[0].free_memory == 0


def test_free_memory_without_nvidia_smi(v100: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(accelerators, "_free_by_uuid", dict)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (3 * GIB, 16 * GIB))
    assert accelerators.accelerator_facts()[0].free_memory == 3 * GIB
