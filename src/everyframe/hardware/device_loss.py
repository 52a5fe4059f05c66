"""Device loss: recognise it from an error, and give the likely cause and fix.

After a fault of the GPU or of a kernel (an Xid of the driver, a memory error, a bus drop-out) the
process's context on the device is dead. Every later call fails too, clean-up included, so the first
error of the chain decides. Imports no torch: the process that handles a dead worker has none.
Out-of-memory errors, which a process survives, are in `memory.py`; what becomes of the run is
decided in `everyframe.engine.run`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from everyframe.core.errors import CannotRunError, DeviceLoss, DeviceLostError, PeerLostError

_LOG = "`sudo dmesg | grep -iE 'xid|amdgpu'` says what the driver saw"

#: Patterns in error texts of CUDA, ROCm, NCCL, Level Zero and Metal; the first match counts. Texts
#: are those of cudaGetErrorString, which HIP has adopted.
_KINDS: Mapping[str, DeviceLoss] = {
    r"\becc error|nvlink error|hipErrorECCNotCorrectable": DeviceLoss(
        "its memory gave wrong bits",
        "`nvidia-smi -q -d ECC` (ROCm: `rocm-smi --showrasinfo all`) counts them; a restart of the "
        "machine sets bad rows aside, and a card that does it again is to be replaced",
        is_of_the_card=True,
    ),
    (
        r"no (cuda|rocm)-capable device|gpu is lost|fallen off the bus|device[ _]lost|"
        r"unknown error|initialization error|system not yet initialized|driver shutting down|"
        r"device is already disconnected"
    ): DeviceLoss(
        "the driver does not reach it any more: power, heat, overclocking, or a machine that slept",
        f"{_LOG}; after sleep `sudo modprobe -r nvidia_uvm && sudo modprobe nvidia_uvm` brings it "
        "back, else a restart of the machine",
        is_of_the_card=True,
    ),
    r"busy or unavailable|devices unavailable": DeviceLoss(
        "another program holds it alone, or it hangs",
        "`nvidia-smi` shows who holds it, and whether its compute mode is exclusive",
        is_of_the_card=True,
    ),
    r"launch timed out": DeviceLoss(
        "a kernel took longer than a card with a display may",
        "compute on a card without one, or on Windows with a larger TdrDelay",
    ),
    r"device-side assert|hipErrorAssert": DeviceLoss(
        "a kernel refused what it was given, such as an index beyond a table: no fault of the card",
        "CUDA_LAUNCH_BLOCKING=1 names the operation, --device cpu the index; report it with what "
        "this prints: everyframe doctor --share",
    ),
    (
        r"illegal memory access|memory access fault|unspecified launch failure|misaligned address|"
        r"illegal instruction|invalid program counter|hardware stack error|invalid address space|"
        r"STATUS_EXECUTION_FAILED|unhandled (cuda|hip) error|command buffer exited with error"
    ): DeviceLoss(
        "a kernel that is wrong here, or a card that is overclocked or broken",
        f"{_LOG}; `everyframe doctor` tries kernels one by one, and --attention math does without "
        "fused ones",
    ),
}
_ANY = DeviceLoss("the driver ended this process's work on it", f"{_LOG}; `everyframe doctor`")

#: Marks a device error among torch errors without a class of their own.
_OF_A_DEVICE = re.compile(
    r"CUDA|cuDNN|cuBLAS|NVML|NVIDIA|ROCm|HIP error|hipError|MIOpen|NCCL|RCCL|UR_RESULT|level_zero|"
    r"\bXPU\b|\bMPS\b|Metal|Memory access fault by GPU|command buffer",
    re.IGNORECASE,
)

#: Errors after which the device still works: a refused call, or no free memory.
_GOES_ON = re.compile(
    r"no kernel image|invalid device function|device kernel image is invalid|invalid argument|"
    r"invalid configuration|too many resources|not supported|invalid device ordinal|"
    r"driver version is insufficient|\bPTX\b|named symbol not found|invalid resource handle|"
    r"captur|out of memory|Failed to CUDA (malloc|calloc|host alloc)",
    re.IGNORECASE,
)

#: Output lines that report an error rather than a warning.
_PRINTED = re.compile(r"error:|fault by GPU|NCCL|RCCL", re.IGNORECASE)

#: Advice that torch adds to every device error; it contains words of other errors.
_ADVICE = re.compile(
    r"\s*(CUDA kernel errors|HIP kernel errors|For debugging|Compile with|Search for)"
)


def parse_device_loss(error: BaseException) -> DeviceLoss | None:
    """Device loss that the error reports; None if it is about something else."""
    if isinstance(error, DeviceLostError):
        return error.loss
    text = "\n".join(_message_lines(str(error)))
    if not isinstance(error, RuntimeError) or _GOES_ON.search(text):
        return None
    message = text.partition("\n")[0].strip() or type(error).__name__
    if (kind := _kind_of(text)) is not None:
        return replace(kind, message=message)
    # Every failed device call has this class; only known harmless ones are excluded.
    return replace(_ANY, message=message) if _is_of_an_accelerator(error) else None


def loss_in(printed: str) -> DeviceLoss | None:
    """Device loss in a dead process's output, such as NCCL's watchdog prints."""
    for line in _message_lines(printed):
        is_error = _PRINTED.search(line) and not _GOES_ON.search(line)
        if is_error and (kind := _kind_of(line)) is not None:
            return replace(kind, message=line.strip().removeprefix("what():").strip()[:200])
    return None


def is_device_loss(error: BaseException) -> bool:
    """Whether the error reports a lost device."""
    return parse_device_loss(error) is not None


@contextmanager
def translate_device_loss(device: str, where: str = "") -> Iterator[None]:
    """Context: convert errors of a lost device to `DeviceLostError`, clean-up errors included.

    Errors during clean-up chain to the first error and do not hide it.

    Raises:
        DeviceLostError: names the device, the error text, the likely cause and the fix.
        CannotRunError: the device refuses a call but is not lost.
    """
    # The caller may be handling an unrelated error.
    theirs = sys.exc_info()[1]
    try:
        yield
    except (DeviceLostError, PeerLostError):
        raise
    except Exception as error:
        loss = loss_behind(error, theirs)
        if loss is not None:
            loss = replace(loss, what=f"{device} was lost {where}".rstrip())
            raise DeviceLostError(
                f"{loss.what} {loss}; this process can't use it any more", loss
            ) from error
        if _is_of_an_accelerator(error) and "out of memory" not in str(error):
            message = str(error).strip().partition("\n")[0]
            raise CannotRunError(
                f"{device} refused a call ({message}); `everyframe doctor` says whether this torch "
                "is made for it, and names the fix"
            ) from error
        raise


def loss_behind(error: BaseException, theirs: BaseException | None = None) -> DeviceLoss | None:
    """Device loss of the earliest error in the chain of `error`; the chain ends before `theirs`.

    An error that was converted before keeps its description.
    """
    found: DeviceLoss | None = None
    at: BaseException | None = error
    seen: set[int] = set()
    while at is not None and at is not theirs and id(at) not in seen:
        seen.add(id(at))
        if isinstance(at, DeviceLostError) and at.loss is not None:
            return at.loss
        found = parse_device_loss(at) or found
        at = at.__cause__ or at.__context__
    return found


def _message_lines(text: str) -> Iterator[str]:
    """Lines of an error without torch's advice and stack trace."""
    for line in text.strip().splitlines():
        if line.startswith("Exception raised from"):
            return
        # Errors joined into one line have it in the middle.
        advice = _ADVICE.search(line)
        message = line if advice is None else line[: advice.start()]
        if message.strip():
            yield message


def _kind_of(text: str) -> DeviceLoss | None:
    """Matching entry of the known device losses, without the error's own text."""
    if not _OF_A_DEVICE.search(text):
        return None
    found = (loss for words, loss in _KINDS.items() if re.search(words, text, re.IGNORECASE))
    return next(found, None)


def _is_of_an_accelerator(error: BaseException) -> bool:
    """Whether the error is torch's own for a failed device call."""
    return any(kind.__name__ == "AcceleratorError" for kind in type(error).__mro__)
