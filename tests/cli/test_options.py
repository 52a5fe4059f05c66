"""Every option of the library is a flag, none is written twice, and help shows them all."""

from __future__ import annotations

import inspect
import re

import pytest

from everyframe.cli import generate, plan
from everyframe.cli.executors import executor_flags
from everyframe.cli.main import COMMANDS, main
from everyframe.cli.options import RUN_FLAGS
from everyframe.core.options import FamilyOptions, facts_of, option
from everyframe.core.request import Request
from everyframe.families import registry


def flags_of(command: object) -> set[str]:
    return set(inspect.signature(command).parameters)  # type: ignore[arg-type]


def fields() -> set[str]:
    models = [Request, *registry.all_options().values()]
    return {
        name
        for model in models
        for name in model.model_fields
        if not facts_of(model, name)["python_only"]
    }


def test_every_field_is_a_flag() -> None:
    own = {each.name for each in executor_flags()}
    assert flags_of(generate.COMMAND) == fields() | set(RUN_FLAGS) | own
    assert flags_of(plan.COMMAND) == fields() | set(RUN_FLAGS) - {"dry_run", "run_dir"}
    assert "latents" not in flags_of(generate.COMMAND)


def test_help_shows_every_flag_and_group(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")  # where no name is to be broken
    assert main(["generate", "--help"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    for name in (
        fields()
        | set(RUN_FLAGS) - {"from_record", "as_profile"}
        | {
            "as",
            "from",
            "steps",
            "frames",
            "cfg",
        }
    ):
        assert f"--{name.replace('_', '-')}" in shown, name
    for group in ("Sampling", "Given frames", "Only opensora models"):
        assert group in shown


def test_a_new_family_brings_its_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    class OtherOptions(FamilyOptions):
        wobble: float | None = option("How much it wobbles.", group="Family")

    from everyframe.cli import options

    monkeypatch.setattr(options, "all_options", lambda: {"other": OtherOptions})
    command = options.make_command(lambda **given: 0, (), "Help.")
    assert "wobble" in flags_of(command)
    assert "aesthetic" not in flags_of(command)


def test_the_list_of_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--help"], ["-h"]):
        assert main(words) == 0
        shown = capsys.readouterr().out
        assert all(name.split()[0] in shown for name in COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    from everyframe._version import __version__

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"everyframe {__version__}\n"


def test_what_is_on_can_be_turned_off(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing else has a flag of its own for that."""
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["plan", "--help"]) == 0
    shown = set(re.findall(r"--no-[\w-]+", capsys.readouterr().out))
    on = {
        name
        for model in [Request, *registry.all_options().values()]
        for name, field in model.model_fields.items()
        if field.default is True
    }
    assert "image_oscillation" in on
    assert shown == {f"--no-{name.replace('_', '-')}" for name in on}


def test_help_of_serve_says_what_is_a_name_and_what_a_host(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["serve", "--help"]) == 0
    shown = capsys.readouterr().out
    for text in ("--models NAME", "--allowed-hosts HOST", "--cors-origin ORIGIN"):
        assert text in shown
    assert "NAME=VALUE" not in shown
