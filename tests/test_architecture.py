"""The rules of the architecture hold for every file of the package, and each of them can fail."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import everyframe
from everyframe.families.registry import family_names
from helpers import architecture_rules
from helpers.architecture_rules import PACKAGE, ROOMS, RULES, Module, Rule
from helpers.import_circles import folder_circles, import_circles

SOURCE = Path(everyframe.__file__).parent

#: The page that describes it.
PAGE = Path(__file__).parent.parent / "docs" / "explanation" / "architecture.md"

#: What `import everyframe` offers. A name is added here and in CHANGELOG.md, and then kept.
PUBLIC_NAMES = {
    "Engine",
    "EveryframeError",
    "EveryframeWarning",
    "InputError",
    "Plan",
    "Request",
    "Video",
    "__version__",
    "calibrate",
    "compile",
    "generate",
    "list_runs",
    "load",
    "load_compiled",
    "plan",
    "quantize",
    "resume",
    "run",
    "save",
    "save_compiled",
    "stream",
    "trace",
    "trace_diff",
}

#: Imports that take long; the package's own import and `--help` must do without them.
SLOW_IMPORTS = ("torch", "transformers", "diffusers", "av", "PIL", "huggingface_hub")


def name_of(path: Path) -> str:
    """The dotted name of a file of the package."""
    parts = (PACKAGE, *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts)


@cache
def modules() -> tuple[Module, ...]:
    """All of them, parsed; not on top, where each worker of the tests would wait for it."""
    return tuple(
        Module.parse(name_of(path), path.read_text(encoding="utf-8"))
        for path in sorted(SOURCE.rglob("*.py"))
    )


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_holds(rule: Rule) -> None:
    found = [f"{module.name}:{problem}" for module in modules() for problem in rule(module)]
    assert not found, f"{rule.__doc__}\n" + "\n".join(found)


#: The rules that hold for the tests themselves.
TEST_RULES = (
    architecture_rules.modules_are_short,
    architecture_rules.modules_have_searchable_names,
)


def test_tests_keep_their_rules() -> None:
    here = Path(__file__).parent
    found = []
    for path in sorted(here.rglob("*.py")):
        # Neither rule asks for the syntax.
        module = Module(path.stem, path.read_text(encoding="utf-8"), ast.Module([], []))
        place = path.relative_to(here)
        found += [f"{place}:{problem}" for rule in TEST_RULES for problem in rule(module)]
    assert not found, "\n".join(found)


def test_every_folder_is_a_room() -> None:
    folders = {path.parent.relative_to(SOURCE).parts[0] for path in SOURCE.glob("*/*.py")}
    assert folders <= set(ROOMS), f"unknown rooms: {folders - set(ROOMS)}"


def test_no_modules_import_each_other() -> None:
    assert import_circles(modules()) == []


@pytest.mark.parametrize("late", ["", "def f():\n    ", "if TYPE_CHECKING:\n    "])
def test_a_planted_circle_is_found(late: str) -> None:
    planted = [
        Module.parse("everyframe.ops.a", "from everyframe.ops.b import x"),
        Module.parse("everyframe.ops.b", f"{late}from everyframe.ops import c"),
        Module.parse("everyframe.ops.c", "import everyframe.ops.a"),
        Module.parse("everyframe.ops.d", "from everyframe.ops.a import y"),
    ]
    circle = ["everyframe.ops.a", "everyframe.ops.b", "everyframe.ops.c"]
    assert import_circles(planted) == [circle]
    assert import_circles(planted[:2]) == []


def test_no_folders_import_each_other() -> None:
    assert folder_circles(modules()) == []


def test_a_planted_circle_of_folders_is_found() -> None:
    planted = [
        Module.parse("everyframe.server.queue.store", "from everyframe.server.queue.jobs import x"),
        Module.parse("everyframe.server.queue.jobs", "from everyframe.server import errors"),
        Module.parse("everyframe.server.errors", "from everyframe.server.http import app"),
        Module.parse("everyframe.server.http.app", "from everyframe.server.queue import store"),
        Module.parse("everyframe.server.process", "from everyframe.server.http import app"),
    ]
    circle = ["everyframe.server.errors", "everyframe.server.http", "everyframe.server.queue"]
    assert folder_circles(planted) == [circle]
    assert folder_circles(planted[:3]) == []


#: Packages of more than two dozen modules.
LARGE = ("diffusers_pipelines", "engine", "fast_paths", "planning", "runtime", "server")


@pytest.mark.parametrize("room", LARGE)
def test_the_large_packages_are_described_module_by_module(room: str) -> None:
    """A module without a place in the page's tables is one that nobody finds."""
    page = PAGE.read_text(encoding="utf-8")
    section = re.split(r"\n##+ ", page.split(f"### `{room}/`\n")[1])[0]
    described = re.findall(r"`(\w+\.py)`", section)
    there = {path.name for path in SOURCE.glob(f"{room}/**/*.py")} - {"__init__.py"}
    assert there == {*described}, f"describe them in {PAGE.name}"


@pytest.mark.parametrize("room", LARGE)
def test_rows_of_their_tables_import_rows_above(room: str) -> None:
    rows = {}
    page = PAGE.read_text(encoding="utf-8").split(f"### `{room}/`\n")[1].split("\n##")[0]
    for number, line in enumerate(page.splitlines()):
        folder = re.match(r"\| `(\w+/)`", line)
        where = f"{room}/{folder[1]}" if folder else f"{room}/"
        for name in re.findall(r"`(\w+)\.py`", line):
            for path in SOURCE.glob(f"{where}{'**/' if folder else ''}{name}.py"):
                rows[name_of(path)] = number
    upward = [
        f"{module.name} imports {target}"
        for module in modules()
        for _, name in module.imports
        for target in (name, name.rpartition(".")[0])
        if rows.get(target, 0) > rows.get(module.name, len(page))
    ]
    assert len(rows) > 20
    assert not upward, "move the row, or the import"


#: The modules that every family has; its networks come beside them.
FAMILY_MODULES = (
    "checkpoint", "components", "config", "denoiser", "family", "options", "settings", "spec",
    "stages",
)  # fmt: skip


@pytest.mark.parametrize("family", sorted({*family_names()} - {"pipeline"}))
def test_families_have_the_same_modules(family: str) -> None:
    there = {path.stem for path in (SOURCE / "families" / family).glob("*.py")}
    assert there >= {*FAMILY_MODULES}


def test_exceptions_are_still_needed() -> None:
    names = {module.name for module in modules()}
    gone = {entry for entry in architecture_rules.LONG_MODULES if entry not in names}
    gone |= {e for e in architecture_rules.LONG_FUNCTIONS if e.split(":")[0] not in names}
    gone |= {
        entry
        for entry in architecture_rules.MAY_CHANGE_THE_PROCESS
        if not any(f"{name}.".startswith(f"{entry}.") for name in names)
    }
    assert not gone, f"exceptions for what is not there any more: {gone}"


VIOLATIONS = [
    ("imports_go_down", "samplers.x", "from everyframe.engine import run"),
    ("imports_go_down", "media.x", "def f():\n    import everyframe.families.opensora.vae"),
    ("imports_go_down", "ops.x", "where = 'everyframe.planning.resolve'"),
    ("imports_go_down", "engine.x", "from everyframe import generate"),
    ("imports_go_down", "core.x", "from . import errors"),
    ("families_stand_alone", "families.svd.vae", "from everyframe.families.opensora.vae import V"),
    ("imports_go_down", "families.svd.vae", "from everyframe.diffusers_pipelines import call"),
    ("modules_have_searchable_names", "runtime.kept", "x = 1"),
    ("modules_have_searchable_names", "engine.last_words", "x = 1"),
    ("modules_have_searchable_names", "parallel.shared_among_ranks", "x = 1"),
    ("modules_have_searchable_names", "test_frames_told", "x = 1"),
    ("core_is_plain_data", "core.x", "def f():\n    import torch.nn"),
    ("core_is_plain_data", "core.x", "@dataclass\nclass Plan: ..."),
    ("core_is_plain_data", "core.x", "@dataclasses.dataclass(slots=True)\nclass Plan: ..."),
    ("modules_are_short", "ops.x", "\n" * 401),
    ("functions_are_short", "ops.x", "def f():\n" + "    x = 1\n" * 60),
    ("modules_say_what_they_are", "ops.x", "x = 1"),
    ("modules_say_what_they_are", "ops.x", '"""Text."""\n\nimport os'),
    ("public_things_have_docstrings", "ops.x", "def f(): return 1"),
    ("public_things_have_docstrings", "ops.x", "class Attention: pass"),
    ("the_library_is_silent", "engine.x", "def f(): print('step')"),
    ("the_library_is_silent", "engine.x", "sys.stderr.write('step')"),
    ("the_library_is_silent", "engine.x", "import os\nos._exit(1)"),
    ("the_library_is_silent", "engine.x", "raise SystemExit(2)"),
    ("no_error_is_swallowed", "engine.x", "try: f()\nexcept: raise"),
    ("no_error_is_swallowed", "engine.x", "try: f()\nexcept Exception: pass"),
    ("no_error_is_swallowed", "engine.x", "try: f()\nexcept (ValueError, Exception): ..."),
    ("no_error_is_swallowed", "engine.x", "try: f()\nexcept OSError: pass"),
    ("no_error_is_swallowed", "engine.x", "with contextlib.suppress(Exception): f()"),
    ("nothing_is_unpickled", "checkpoints.x", "torch.load(path)"),
    ("nothing_is_unpickled", "checkpoints.x", "torch.load(path, weights_only=False)"),
    ("nothing_is_unpickled", "checkpoints.x", "pickle.loads(data)"),
    ("nothing_is_unpickled", "parallel.x", "dist.all_gather_object(found, value)"),
    ("nothing_is_unpickled", "checkpoints.x", "np.load(path, allow_pickle=True)"),
    ("precision_is_by_construction", "ops.x", "with torch.autocast('cuda'): f()"),
    ("precision_is_by_construction", "ops.x", "from torch.amp import autocast"),
    ("precision_is_by_construction", "ops.x", "torch.is_autocast_enabled()"),
    ("methods_are_not_assigned", "parallel.x", "model.block.forward = split"),
    ("methods_are_not_assigned", "parallel.x", "setattr(model, 'forward', split)"),
    ("nothing_is_mocked", "diffusers_pipelines.x", "from unittest.mock import patch"),
    ("nothing_is_mocked", "ops.x", "def f():\n    import unittest.mock"),
    ("the_process_is_left_alone", "ops.x", "import torch\ntorch.autocast = nullcontext"),
    ("the_process_is_left_alone", "ops.x", "import torch\ntorch.backends.cudnn.benchmark = True"),
    ("the_process_is_left_alone", "ops.x", "import os\nos.environ['A'] = '1'"),
    ("the_process_is_left_alone", "ops.x", "import sys\nsys.modules['torch'] = ours"),
    ("the_process_is_left_alone", "ops.x", "torch.set_default_dtype(torch.bfloat16)"),
    ("the_process_is_left_alone", "ops.x", "with catch_warnings(): simplefilter('ignore')"),
    ("the_process_is_left_alone", "ops.x", "nn.modules.register_module_forward_hook(f)"),
]


@pytest.mark.parametrize(("rule", "name", "source"), VIOLATIONS)
def test_rule_can_fail(rule: str, name: str, source: str) -> None:
    planted = Module.parse(f"{PACKAGE}.{name}", source)
    assert list(getattr(architecture_rules, rule)(planted)), "the planted violation was not found"


def test_every_rule_has_a_planted_violation() -> None:
    assert {rule for rule, _, _ in VIOLATIONS} == {rule.__name__ for rule in RULES}


GOOD = [
    ("families.opensora.family", "from everyframe.runtime.interface import Family"),
    ("families.registry", "where = 'everyframe.families.opensora.options'"),
    ("cli.main", "def main() -> None:\n    '''Run.'''\n    print('done'); sys.exit(0)"),
    ("media.record", "from everyframe._version import __version__"),
    ("ops.x", "'''No autocast here; we never print.'''"),
    ("engine.x", "try: f()\nexcept OSError as error: raise InputError('x') from error"),
    ("checkpoints.x", "torch.load(path, map_location='cpu', weights_only=True)"),
]


@pytest.mark.parametrize(("name", "source"), GOOD)
def test_rules_leave_good_code_alone(name: str, source: str) -> None:
    whole = source if source.startswith("'''") else f"'''Text.'''\n{source}"
    if "def " in source or "import" in source:
        whole = whole.replace("'''Text.'''\n", "'''Text.'''\nfrom __future__ import annotations\n")
    module = Module.parse(f"{PACKAGE}.{name}", whole)
    assert not [problem for rule in RULES for problem in rule(module)]


def slow_imports_after(program: str) -> set[str]:
    """Which of `SLOW_IMPORTS` a fresh interpreter has imported after running `program`."""
    ask = f"import sys\n{program}\nprint('loaded:', *(set(sys.modules) & set({SLOW_IMPORTS!r})))"
    result = subprocess.run(
        [sys.executable, "-c", ask],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(SOURCE.parent)},
    )
    assert result.returncode == 0, result.stderr
    return set(result.stdout.rsplit("loaded:", 1)[1].split())


def test_importing_the_package_imports_nothing_slow() -> None:
    assert slow_imports_after(f"import {PACKAGE}") == set()


def test_a_slow_import_would_be_seen() -> None:
    assert slow_imports_after("import PIL") == {"PIL"}


def test_help_imports_nothing_slow() -> None:
    program = "from everyframe.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: ..."
    assert slow_imports_after(program) == set()


def test_public_names() -> None:
    assert set(everyframe.__all__) == PUBLIC_NAMES
    assert list(everyframe.__all__) == sorted(everyframe.__all__)
    for name in PUBLIC_NAMES:
        assert getattr(everyframe, name) is not None


def test_version_is_a_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", everyframe.__version__)
