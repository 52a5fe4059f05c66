"""Two threads plan and generate at once; a third, which is nobody of ours, is not disturbed.

It casts, draws, makes modules and tensors, and has a number of threads, each for itself.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models import attention_dispatch
from diffusers.utils import torch_utils
from torch import Tensor, nn
from torch.nn.modules import module as modules

import everyframe
from everyframe.diffusers_pipelines.library_patches import float32_noise, stand_in_accepted
from everyframe.dry_run import executor
from everyframe.hardware.cpu import cpu_threads
from everyframe.runtime.components.meta_init import BUILD_LOCK
from helpers.new_thread import threads_of_a_new_thread
from helpers.tiny_checkpoints import opensora as tiny_opensora
from helpers.tiny_checkpoints import pipelines as tiny_pipelines

pytestmark = pytest.mark.usefixtures("own_cache")

OWN: dict[str, Any] = {
    "prompt": "a red circle", "size": "16x16", "num_frames": 3, "num_inference_steps": 2,
}  # fmt: skip
PIPE: dict[str, Any] = {"prompt": "a fox", "num_inference_steps": 2, **tiny_pipelines.CALLS["wan"]}
#: Names that foreign code looks up in torch: a bystander finds torch's own.
NAMES = {
    "autocast": torch.autocast, "Generator": torch.Generator, "randn": torch.randn,
    "Tensor": torch.Tensor,
}  # fmt: skip


class Bystander:
    """Computes the same again and again, and compares with what it got alone."""

    def __init__(self, *, makes_modules: bool = True) -> None:
        self._makes_modules = makes_modules
        self.layer, self.x = nn.Linear(8, 8), torch.ones(4, 8)
        self.wanted = self.compute()
        self.num_rounds = 0
        self.found: list[str] = []

    def compute(self) -> list[Tensor]:
        """Autocast, an own generator, the default dtype, a module made here."""
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            cast = self.layer(self.x)
        with torch.no_grad():
            full = self.layer(self.x)
        drawn = [torch.randn(64, generator=generator, dtype=d) for d in (None, torch.bfloat16)]
        made = [cast, full, *drawn, torch.zeros(3), torch.linspace(0, 1, 7)]
        if self._makes_modules:
            layer = nn.Linear(8, 8)
            nn.init.constant_(layer.weight, 0.5)
            made.append(layer.weight.detach())
        return made

    def looks(self) -> Iterator[str]:
        """What is not as it is alone."""
        for name, own in NAMES.items():
            if getattr(torch, name) is not own:
                yield f"torch.{name} is replaced"
        if type(torch.Generator()) is not torch.Generator:
            yield "a generator has another type"
        if modules._global_forward_pre_hooks or modules._global_forward_hooks:
            yield "all modules have a hook"
        if torch.get_num_threads() != 1:
            yield "the number of threads is another one"
        if torch.is_autocast_enabled("cpu") or torch.get_default_dtype() != torch.float32:
            yield "it casts, or has another dtype"
        for got, wanted in zip(self.compute(), self.wanted, strict=True):
            if got.dtype != wanted.dtype or got.device != wanted.device:
                yield f"{got.dtype} on {got.device}, and {wanted.dtype} on {wanted.device} alone"
            elif not torch.equal(got, wanted):
                yield "it computed something else"

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Context: it computes in a thread of its own."""
        end = threading.Event()

        def go() -> None:
            torch.set_num_threads(1)
            while not end.is_set():
                self.found += self.looks()
                self.num_rounds += 1
                time.sleep(0.002)

        thread = threading.Thread(target=go)
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join()

    def is_undisturbed(self) -> None:
        """Raise `AssertionError` if it saw anything."""
        assert self.num_rounds > 20
        assert not self.found, sorted({*self.found})


def in_two_threads(work: Callable[[int], object]) -> None:
    """Call ``work(0)`` and ``work(1)`` at once, and raise what they raise."""
    start, errors = threading.Barrier(2), []

    def go(number: int) -> None:
        try:
            start.wait()
            work(number)
        except BaseException as error:  # raised below
            errors.append(error)

    threads = [threading.Thread(target=go, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = tmp_path_factory.mktemp("models")
    for name in ("wan", "mochi"):
        tiny_pipelines.TINY[name](made / name)
    return {
        "ours": tiny_opensora.opensora_1_2(made / "ours"),
        "wan": made / "wan",
        "mochi": made / "mochi",
    }


def asked_of(folders: dict[str, Path], which: str) -> dict[str, Any]:
    asked = OWN if which == "ours" else {**PIPE, **tiny_pipelines.CALLS[which]}
    return {"model": str(folders[which]), **asked}


def plan_all(folders: dict[str, Path], number: int) -> None:
    """Plans of all of them, in a size that nobody has planned in this process."""
    for which in folders:
        asked = {**asked_of(folders, which), "size": f"{32 + 16 * number}x16"}
        assert not everyframe.plan(profile=("mps", "cuda-sm75")[number % 2], **asked).dtype_errors


def test_a_number_of_threads_is_that_of_one_thread() -> None:
    assert threads_of_a_new_thread() == 1
    with cpu_threads(2):
        assert (torch.get_num_threads(), threads_of_a_new_thread()) == (2, 1)
        with cpu_threads(3):
            assert (torch.get_num_threads(), threads_of_a_new_thread()) == (3, 1)
    assert (torch.get_num_threads(), threads_of_a_new_thread()) == (1, 1)


def test_a_third_thread_is_not_disturbed_by_our_models(folders: dict[str, Path]) -> None:
    bystander = Bystander()

    def work(number: int) -> None:
        with cpu_threads(2):
            plan_all({"ours": folders["ours"]}, number)
            for dtype in ("fp32", "bf16"):
                everyframe.generate(seed=number, dtype=dtype, **asked_of(folders, "ours"))

    with bystander.beside():
        in_two_threads(work)
    bystander.is_undisturbed()


def test_a_third_thread_is_not_disturbed_by_pipelines(folders: dict[str, Path]) -> None:
    bystander = Bystander()
    pipes = [tiny_pipelines.loaded(folders["wan"]) for _ in range(2)]

    def work(number: int) -> None:
        with cpu_threads(2):
            plan_all({name: folders[name] for name in ("wan", "mochi")}, number)
            everyframe.run(pipes[number], seed=number, **PIPE)

    with bystander.beside():
        in_two_threads(work)
    bystander.is_undisturbed()


def test_a_third_thread_is_not_disturbed_while_libraries_load(folders: dict[str, Path]) -> None:
    """But for modules that it makes: diffusers and transformers patch torch while they load."""
    bystander = Bystander(makes_modules=False)

    def work(number: int) -> None:
        for which in ("wan", "mochi"):
            everyframe.generate(seed=number, dtype="fp32", **asked_of(folders, which))

    with bystander.beside():
        in_two_threads(work)
    bystander.is_undisturbed()


def test_libraries_are_as_before_when_two_overlap(folders: dict[str, Path]) -> None:
    """The last one restores, whoever came first."""
    pipe = tiny_pipelines.loaded(folders["mochi"])
    home = sys.modules[type(pipe.transformer.rope).__module__]
    table = torch_utils._DTYPE_UNSUPPORTED_DEVICES

    def seen() -> tuple[Any, ...]:
        return (
            home.torch,
            attention_dispatch.flex_attention,
            torch_utils.randn_tensor,
            *table.values(),
        )

    before = seen()
    first, second = (stand_in_accepted([pipe.transformer.rope]) for _ in range(2))
    noise = [float32_noise(), float32_noise()]
    for context in (first, noise[0], second, noise[1]):
        context.__enter__()
    for context in (first, noise[0]):
        context.__exit__(None, None, None)
    assert all(now is not once for now, once in zip(seen(), before, strict=True))
    with home.torch.autocast("meta", enabled=False):
        assert isinstance(home.torch.Generator("meta"), torch.Generator)
    assert home.torch.float32 is torch.float32
    for context in (second, noise[1]):
        context.__exit__(None, None, None)
    assert all(now is once for now, once in zip(seen(), before, strict=True))
    with pytest.raises(RuntimeError):
        home.torch.autocast("meta", enabled=False)


@pytest.mark.parametrize("which", ["ours", "wan"])
def test_no_library_loads_during_a_dry_run(
    folders: dict[str, Path], which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it loads, what is made without a dtype would be of another size in the plan."""
    holds: list[bool] = []
    own = executor.dry_run_modules

    def seen(*given: Any, **named: Any) -> Any:
        holds.append(BUILD_LOCK._is_owned())  # type: ignore[attr-defined]
        return own(*given, **named)

    monkeypatch.setattr(executor, "dry_run_modules", seen)
    plan_all({which: folders[which]}, 3)
    assert holds
    assert all(holds)
