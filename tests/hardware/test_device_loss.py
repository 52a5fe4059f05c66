"""Which errors say that a device is lost, in the words that drivers and libraries use."""

from __future__ import annotations

import pytest
import torch

from everyframe.core.errors import CannotRunError, DeviceLostError, InputError
from everyframe.core.request import Request
from everyframe.hardware.device_loss import (
    is_device_loss,
    loss_behind,
    loss_in,
    parse_device_loss,
    translate_device_loss,
)
from helpers.lost_device import ADVICE

ACCELERATOR = torch.AcceleratorError


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (ACCELERATOR("CUDA error: uncorrectable ECC error encountered"), "nvidia-smi -q -d ECC"),
        (ACCELERATOR("HIP error: an illegal memory access was encountered"), "dmesg"),
        (RuntimeError("CUDA error: unspecified launch failure"), "everyframe doctor"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `x`"), "math"),
        (RuntimeError("CUDA error: device-side assert triggered"), "CUDA_LAUNCH_BLOCKING=1"),
        (RuntimeError("CUDA error: the launch timed out and was terminated"), "TdrDelay"),
        (RuntimeError("No CUDA-capable device is detected"), "nvidia_uvm"),
        (RuntimeError("No HIP GPUs; HIP error: no ROCm-capable device is detected"), "restart"),
        (ACCELERATOR("CUDA error: CUDA-capable device(s) is/are busy or unavailable"), "who holds"),
        (RuntimeError("NCCL error in: x.cpp:1, unhandled cuda error, NCCL version 2.27"), "dmesg"),
        (RuntimeError("level_zero backend failed: UR_RESULT_ERROR_DEVICE_LOST"), "restart"),
        (ACCELERATOR("CUDA error: something that is new in CUDA 14"), "everyframe doctor"),
    ],
)  # fmt: skip
def test_a_lost_device_is_known_by_its_words(error: RuntimeError, fix: str) -> None:
    loss = parse_device_loss(type(error)(f"{error}{ADVICE}"))
    assert loss is not None
    assert loss.message == str(error)
    assert fix in loss.fix
    assert "\n" not in str(loss)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        ACCELERATOR("CUDA error: out of memory"),
        ACCELERATOR("CUDA error: no kernel image is available for execution on the device"),
        ACCELERATOR("CUDA error: invalid configuration argument"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx`"),
        RuntimeError(
            "NCCL error in: x.cpp:1, unhandled cuda error, NCCL version 2.28.9\n"
            "Last error:\nFailed to CUDA calloc async 24 bytes"
        ),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError("an unknown error"),
        ValueError("CUDA error: unspecified launch failure"),
    ],
)
def test_what_is_not_about_a_lost_device(error: Exception) -> None:
    assert not is_device_loss(type(error)(f"{error}{ADVICE}"))


def test_the_first_of_several_errors_is_reported() -> None:
    """Cleaning up raises errors of its own, of other classes too."""

    def fails() -> None:
        try:
            try:
                raise ACCELERATOR("CUDA error: uncorrectable ECC error encountered" + ADVICE)
            finally:
                raise ACCELERATOR("CUDA error: unspecified launch failure" + ADVICE)
        except RuntimeError as error:
            raise KeyError("what cleaning up was to find") from error

    with (
        pytest.raises(DeviceLostError) as raised,
        translate_device_loss("cuda:1 (a card)", "in denoise"),
    ):
        fails()
    assert str(raised.value).startswith(
        "cuda:1 (a card) was lost in denoise (CUDA error: uncorrectable ECC error encountered): "
    )
    assert "\n" not in str(raised.value)
    loss = loss_behind(raised.value)
    assert loss is not None
    assert loss.what == "cuda:1 (a card) was lost in denoise"
    assert loss.message == "CUDA error: uncorrectable ECC error encountered"
    assert is_device_loss(raised.value)
    assert isinstance(again := raised.value.reworded("in other words"), DeviceLostError)
    assert again.loss == loss


def test_the_caller_s_own_loss_is_not_ours() -> None:
    """Who goes on elsewhere after a loss may well ask for something that can't be."""
    try:
        raise ACCELERATOR("CUDA error: unspecified launch failure")
    except RuntimeError:
        with pytest.raises(InputError), translate_device_loss("cpu"):
            Request(height=-8)


def test_a_device_that_refuses_is_not_lost() -> None:
    with pytest.raises(CannotRunError, match=r"refused a call .*everyframe doctor"), \
            translate_device_loss("cuda:0"):  # fmt: skip
        raise ACCELERATOR("CUDA error: no kernel image is available for execution on the device")


def test_what_a_dead_process_printed() -> None:
    printed = (
        "UserWarning: CUDA initialization: CUDA unknown error - this may be due to a setup\n"
        "terminate called after throwing an instance of 'c10::DistBackendError'\n"
        "  what():  [Rank 1] Process group watchdog thread terminated with exception: CUDA error: "
        f"unspecified launch failure{ADVICE}"
        "Exception raised from c10_cuda_check_implementation at x.cpp:44 (most recent call first):"
    )
    loss = loss_in(printed)
    assert loss is not None
    assert loss.message.startswith("[Rank 1] Process group watchdog")
    assert "a kernel that is wrong here" in loss.likely
    assert loss_in(printed.splitlines()[0]) is None
    amd = "Memory access fault by GPU node-1 (Agent handle: 0x1) on address 0x7f. Page not present."
    assert loss_in(amd) is not None
