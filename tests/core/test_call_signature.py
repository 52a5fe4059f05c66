"""Editors and type checkers know each option of the Python functions, from its one source."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import everyframe
from everyframe.core.call_signature import accepted_type, with_options
from everyframe.core.options import Options, option
from everyframe.core.request import Request
from everyframe.engine.resumption.replan import OF_RANKS
from everyframe.families.registry import all_options, options_of

SOURCE = Path(everyframe.__file__).parent
STUB = ast.parse((SOURCE / "__init__.pyi").read_text(encoding="utf-8"))
COMMON = {*Request.model_fields} - {"family_options"}
FAMILIES = {name for options in all_options().values() for name in options.model_fields}
OPTIONS = {
    "generate": COMMON | FAMILIES,
    "plan": COMMON | FAMILIES,
    "run": COMMON | {*options_of("pipeline").model_fields},
    "resume": {*OF_RANKS},
}


def stub_of(name: str) -> ast.FunctionDef:
    (found,) = (n for n in STUB.body if isinstance(n, ast.FunctionDef) and n.name == name)
    return found


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_is_in_the_stub_with_its_default_and_help(name: str) -> None:
    function = stub_of(name)
    arguments = function.args
    defaults = {
        each.arg: ast.literal_eval(default)
        for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is not None
    }
    help_texts = ast.get_docstring(function) or ""
    models: list[type[Options]] = [*all_options().values(), Request]
    fields = {name: field for model in models for name, field in model.model_fields.items()}
    for each in OPTIONS[name] - {"prompt"}:
        assert defaults[each] == fields[each].default, each
        assert f"\n    {each}: " in help_texts, each


def test_the_stub_has_the_public_names() -> None:
    bound = {alias.asname for n in STUB.body if isinstance(n, ast.ImportFrom) for alias in n.names}
    defined = {n.name for n in STUB.body if isinstance(n, ast.FunctionDef)}
    assert {*everyframe.__all__} == (bound - {None}) | defined


@pytest.mark.parametrize("name", OPTIONS)
def test_notebooks_see_the_same_signature(name: str) -> None:
    seen = inspect.signature(getattr(everyframe, name)).parameters
    arguments = stub_of(name).args
    written = [*arguments.args, *arguments.kwonlyargs, *filter(None, [arguments.kwarg])]
    assert [*seen] == [each.arg for each in written]
    types = [ast.unparse(each.annotation) for each in written if each.annotation]
    assert [ast.unparse(ast.parse(each.annotation)) for each in seen.values()] == types


class Planted(Options):
    """Options of a function that only this file has."""

    amount: str | None = option("How much.", group="What", accepts=("int",))
    places: tuple[str, ...] = option("Where.", group="What", default=())
    table: dict[str, tuple[str, ...]] | None = option("Which.", group="What")
    thing: Any = option("What.", group="What", names_model=True)


def test_types_are_those_that_python_callers_may_give() -> None:
    assert {name: accepted_type(Planted, name) for name in Planted.model_fields} == {
        "amount": "str | int | None",
        "places": "Sequence[str]",
        "table": "Mapping[str, Sequence[str]] | None",
        "thing": "Any",
    }


def test_a_function_keeps_its_own_arguments_and_takes_the_options_that_it_asks_for() -> None:
    @with_options([Planted], only=("amount", "thing"), amount="int")
    def closed(thing: str, **options: Any) -> None: ...

    @with_options([Planted], is_open=True)
    def open_(**options: Any) -> None: ...

    assert str(inspect.signature(closed)) == "(thing: 'str', *, amount: 'int' = None) -> 'None'"
    assert [*inspect.signature(open_).parameters] == [*Planted.model_fields, "options"]


#: Python values that are no text of a command line; `Request` accepts each, and so does mypy.
RIGHT: dict[str, tuple[Any, str]] = {
    "size": ((640, 360), "(640, 360)"),
    "dtype": (torch.bfloat16, "torch.bfloat16"),
    "device": (torch.device("cpu"), 'torch.device("cpu")'),
    "devices": ([0, "cpu"], '[0, "cpu"]'),
    "shares": ([24, 8.5], "[24, 8.5]"),
    "max_memory": (8_000_000_000, "8_000_000_000"),
    "disable": (["compile"], '["compile"]'),
    "model": (Path("x"), 'Path("x")'),
    "report": (Path("x"), 'Path("x")'),
    "seconds": (2, "2"),
    "motion_score": (3, "3"),
    "controlnet_conditioning_scale": ([0.5, 0.8], "[0.5, 0.8]"),
}
#: A wrong call -> mypy's code of the error.
WRONG = {
    'everyframe.generate("a", num_frames="many")': "arg-type",
    'everyframe.generate("a", num_framez=17)': "call-arg",
    'everyframe.generate("a", size=640)': "arg-type",
    'everyframe.generate("a", aesthetic="good")': "arg-type",
    'everyframe.generate("a", output="bytes")': "arg-type",
    'everyframe.generate(["a", "b"])': "arg-type",
    'everyframe.plan("a", seed=1.5)': "arg-type",
    'everyframe.plan("a", steps=4)': "call-arg",
    'everyframe.run(pipe, num_videos="two")': "arg-type",
    'everyframe.run(pipe, fit=1)': "arg-type",
    "everyframe.resume(num_devices=2.5)": "arg-type",
    "everyframe.plan_all()": "attr-defined",
}  # fmt: skip
GOOD = (
    'everyframe.generate("a", num_videos=2, on_event=print, motion_bucket_id=127, **anything)',
    "everyframe.generate(from_record={}, isolate=True)",
    'everyframe.plan(everyframe.Request(prompt="a"), profile="rtx-4090")',
    'everyframe.plan(prompt="a").settings',
    'everyframe.run(pipe, ["a", "b"], negative_prompt=["c", "d"], output_type="pt", shift=3.0)',
    'everyframe.resume("name", devices=[0, 1], shard_weights=True, image="cat.png")',
    "everyframe.list_runs()[0].path",
)


@pytest.mark.parametrize("name", RIGHT)
def test_python_values_are_accepted(name: str) -> None:
    value = RIGHT[name][0]
    owners = [Request, *(each for each in all_options().values())]
    owner = next(each for each in owners if name in each.model_fields)
    owner(**{name: value})


def test_mypy_accepts_right_calls_and_refuses_wrong_ones(tmp_path: Path) -> None:
    right = [*GOOD, *(f'everyframe.generate("a", {name}={RIGHT[name][1]})' for name in RIGHT)]
    lines = [
        "from pathlib import Path", "from typing import Any", "import torch", "import everyframe",
        "pipe: Any = None", "anything: dict[str, Any] = {}", *right, *WRONG,
    ]  # fmt: skip
    (tmp_path / "calls.py").write_text("\n".join(lines) + "\n", encoding="utf-8")
    # Only the calls are checked here; the package itself is by `make types`.
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\nstrict = true\nfollow_imports = silent\n"
        "[mypy-av.*,diffusers.*,huggingface_hub.*,numpy.*,PIL.*,psutil.*,pydantic.*,safetensors.*,"
        "transformers.*,yaml.*]\nfollow_imports = skip\nignore_missing_imports = true\n"
        # Nor is what no signature of the stub speaks of.
        "[mypy-torch.*,everyframe.checkpoints.*,everyframe.diffusers_pipelines.*,"
        "everyframe.dry_run.*,everyframe.families.*,everyframe.fast_paths.*,"
        "everyframe.hardware.*,everyframe.numerics.*,everyframe.ops.*,everyframe.parallel.*,"
        "everyframe.planning.*,everyframe.precision.*,everyframe.runtime.*,everyframe.samplers.*,"
        "everyframe.adapters.*]\nfollow_imports = skip\n",
        encoding="utf-8",
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "calls.py"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(SOURCE.parent)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    found = dict(re.findall(r"calls\.py:(\d+): error: .*\[([\w-]+)\]", done.stdout))
    wanted = {lines.index(line) + 1: code for line, code in WRONG.items()}
    assert {int(line): code for line, code in found.items()} == wanted, done.stdout + done.stderr
