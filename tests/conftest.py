"""What holds for every test: one thread, no network, no cache of this machine, honest skips."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import forkserver, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from everyframe.core.events import Event
from everyframe.hardware import throughput
from everyframe.ops.native import library
from helpers import fake_cpus, freed_memory

if TYPE_CHECKING:
    from helpers.planted_compiler import PlantedCompiler

# These must be set before anything imports torch or the hub's client. Child processes inherit them.
_CACHE = tempfile.TemporaryDirectory(prefix="everyframe-tests-")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HOME"] = str(Path(_CACHE.name, "hub"))
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parent.parent / "src"), os.environ.get("PYTHONPATH")])
)
os.environ["EVERYFRAME_CACHE"] = str(Path(_CACHE.name, "everyframe"))
# A worker process would import torch for each of the commands that the tests give; those of
# `end_to_end/test_workers.py` have one.
os.environ["EVERYFRAME_IN_PROCESS"] = "1"
os.environ["EVERYFRAME_RUNS"] = str(Path(_CACHE.name, "runs"))
os.environ["XDG_CONFIG_HOME"] = str(Path(_CACHE.name, "config"))
os.environ["XDG_STATE_HOME"] = str(Path(_CACHE.name, "state"))
# A plan that is shown tries what it will spend its time on, for most of a second where the model is
# large. By less of it a forecast is as much a forecast; `hardware/test_throughput.py` has the
# whole.
throughput._CPU_OPERATIONS, throughput._ENOUGH = 6e6, 0.0
freed_memory.keep()
#: What processes of the tests are forked from has imported these, whoever starts the first one:
#: there is one such server for all of them, and diffusers takes seconds in each that lacks it.
PRELOAD = [
    "torch", "transformers", "diffusers.pipelines.latte.pipeline_latte", "everyframe.engine.run",
    "everyframe.dry_run.executor", "everyframe.families.opensora.stages",
    "everyframe.families.svd.unet", "helpers.rank_pool",
]  # fmt: skip
# Some of them ask torch for cards as they are imported, after which no process that is forked from
# theirs may use one. Where there are cards, such processes begin as users' do: with torch alone.
if Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists():
    PRELOAD = ["torch"]
forkserver.set_forkserver_preload(["helpers.preload_begin", *PRELOAD, "helpers.preload_end"])
forkserver.set_forkserver_preload = lambda modules: None


def _start_beside_helpers(path: bytes, args: list[str], passfds: Any) -> int:
    """Start a process of multiprocessing's own; that which others are forked from has `helpers`."""
    *words, code = args
    if "multiprocessing.forkserver" in code:
        code = f"import sys; sys.path.append({str(Path(__file__).parent)!r}); {code}"
    return _START(path, [*words, code], passfds)


_START = util.spawnv_passfds
util.spawnv_passfds = _start_beside_helpers


#: The files that take longest, which are begun first: else one worker has one of them at the end.
LONG = (
    "families/test_contract.py", "families/test_contract_distributed.py", "test_docs.py",
    "planning/test_dry_runs.py", "families/opensora2/test_stages.py", "adapters/test_merge.py",
    "families/inpaint/test_stages.py", "adapters/test_component_requests.py",
    "planning/test_load_balancing.py", "end_to_end/test_startup.py", "end_to_end/test_serve.py",
    "planning/memory/test_memory_fit.py", "engine/test_batched_runs.py",
    "families/svd/test_stages.py", "end_to_end/test_repairs.py", "hardware/test_isolation.py",
    "diffusers_pipelines/inputs/test_call_options.py",
)  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Have pytest-xdist take files in our order, and not those of the most tests first.

    And a made-up processor's flags in place of this one's, where ``--cpu`` names one.
    """
    config.option.loadscopereorder = False
    if config.getoption("--cpu"):
        fake_cpus.plant(config.getoption("--cpu"), Path(_CACHE.name, "proc"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--slow`` runs the tests marked slow as well, ``--cpu`` all by another CPU's flags."""
    parser.addoption("--slow", action="store_true", help="run tests marked slow as well")
    parser.addoption(
        "--cpu", choices=sorted(fake_cpus.FLAGS), help="flags of a CPU that plans go by"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long files first; no slow tests unless asked for; GPU tests skip where there is no GPU."""
    missing = [name for name in LONG if not Path(__file__).parent.joinpath(name).is_file()]
    if missing:
        raise pytest.UsageError(f"LONG in tests/conftest.py names no file: {', '.join(missing)}")
    items.sort(key=lambda item: not item.path.as_posix().endswith(LONG))
    if not (config.getoption("--slow") or "slow" in config.getoption("-m")):
        slow = [item for item in items if item.get_closest_marker("slow")]
        if slow:
            config.hook.pytest_deselected(items=slow)
            items[:] = [item for item in items if not item.get_closest_marker("slow")]
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not _has_gpu():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a GPU; torch sees none here"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """No garbage is looked for among what is imported: two seconds of ten, and there is none."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """What was imported stays: whoever looks for garbage need not look at it again and again."""
    gc.collect()
    gc.freeze()


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available() or torch.backends.mps.is_available()


@pytest.fixture(autouse=True, scope="session")
def _kernels_are_compiled_once(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The kernels in C, which take three seconds, by one of the processes that share the tests.

    Each has a cache folder of its own, and so do its ranks, which would compile all at once.
    """
    is_shared = hasattr(request.config, "workerinput")
    # Torch brings the threads that they are linked with.
    if not is_shared or "torch" not in sys.modules or library.why_not():
        return
    import fcntl

    shared = tmp_path_factory.getbasetemp().parent / "native"
    with open(shared.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = Path(os.environ["EVERYFRAME_CACHE"], shared.name)
        if shared.is_dir():
            shutil.copytree(shared, folder)
            return
        with suppress(library.NoLibraryError):
            library._load()
        if folder.is_dir():
            shutil.copytree(folder, shared)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Open-Sora 1.2 that no test changes."""
    from helpers.tiny_checkpoints import opensora

    return str(opensora.opensora_1_2(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="session")
def tiny_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the checkpoints of `tiny_models`.

    One for all tests: a plan of a pipeline that was planned before needs no dry run.
    """
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def tiny_models(tiny_root: Path) -> Callable[[str], Path]:
    """The tiny checkpoint of that name in `families.NAMES`, written once; no test changes it."""
    from helpers.tiny_checkpoints import families

    return lambda name: families.made(name, tiny_root)


@pytest.fixture(scope="module")
def whole(model: str, tmp_path_factory: pytest.TempPathFactory) -> list[Event]:
    """An unbroken run of `model`, to compare with runs that were interrupted."""
    from helpers.interrupted_runs import OPEN_SORA, begun

    return list(begun(tmp_path_factory.mktemp("runs"), model=model, **OPEN_SORA))


@pytest.fixture(autouse=True, scope="module")
def _no_repairs_of_other_files() -> None:
    """What faults planted in one file taught is not known to another of the same tiny weights."""
    _forget_repairs()


@pytest.fixture(autouse=True, scope="module")
def _no_search_of_what_stays() -> None:
    """As at the end of the collection, for what the tests of other files imported since."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache folder for one test."""
    monkeypatch.setenv("EVERYFRAME_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def inference_mode() -> Iterator[None]:
    """As in a run."""
    import torch

    with torch.inference_mode():
        yield


@pytest.fixture
def no_grad() -> Iterator[None]:
    """As in a run, but for weights that a test changes."""
    import torch

    with torch.no_grad():
        yield


@pytest.fixture
def compiler(own_cache: None, monkeypatch: pytest.MonkeyPatch) -> PlantedCompiler:
    """A compiler in this process, which makes a library of Python code."""
    from helpers.planted_compiler import PlantedCompiler

    return PlantedCompiler(monkeypatch)


@pytest.fixture
def unrepaired() -> None:
    """Nor to this test what another of its file taught."""
    _forget_repairs()


def _forget_repairs() -> None:
    shutil.rmtree(Path(os.environ["EVERYFRAME_CACHE"], "repairs"), ignore_errors=True)


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    """What a test computes with more threads does not change the bits of those after it."""
    yield
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """What a test of the command line sets up to speak does not speak in the tests after it."""
    root, own = logging.getLogger(), logging.getLogger("everyframe")
    handlers, level = list(root.handlers), own.level
    yield
    for handler in [each for each in root.handlers if each not in handlers]:
        root.removeHandler(handler)
    if own.level != level:  # else every logger there is would look for its level again
        own.setLevel(level)
