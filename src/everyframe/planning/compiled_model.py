"""Compile the blocks of a model for a request, and save them in a folder; no weights are loaded.

A plan's trials compile and certify (`component_certificates`). Later runs find the results in the
certificate store; the folder is a copy for the user.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from everyframe.core.errors import CannotRunError
from everyframe.core.plan import FastPathChoice, Plan
from everyframe.core.request import Request
from everyframe.planning.resolve import prepare

_PATH = "compile"


@dataclass(frozen=True)
class CompiledModel:
    """Where compiled blocks were saved, and the verdict on each component."""

    plan: Plan
    folder: Path
    choices: dict[str, FastPathChoice]


def compile_model(request: Request, target: str | Path) -> CompiledModel:
    """Compile what a run of this request calls again and again; takes minutes the first time.

    Raises:
        CannotRunError: nothing of it can be compiled here, or is faster so; with the reasons.
        InputError: the request is wrong, or the folder holds something else.
    """
    from everyframe.fast_paths.compilation import package_store

    package_store.check_target(target)  # compiling takes minutes
    asked = Request(**{**request.given(), "compile": True})
    prepared = prepare(asked, may_fetch=True, will_run=True)
    if prepared.plan.infeasible is not None:
        raise CannotRunError(prepared.plan.infeasible)
    certificates = prepared.chooser.certificates
    choices: dict[str, FastPathChoice] = {}
    files: set[str] = set()
    for part in prepared.plan.components:
        own = [run for run in prepared.fitted.runs if run.stage_call.component == part.name]
        for choice in part.choices:
            if choice.path != _PATH:
                continue
            choices[part.name] = choice
            if choice.verdict == "certified" and certificates is not None:
                files.update(certificates.of(part.name, part.precision, own)[_PATH].packages)
    if not files:
        reasons = [f"{name}: {choice.reason}" for name, choice in choices.items()]
        message = "; ".join(reasons) or "no component is called often enough"
        raise CannotRunError(f"{prepared.plan.model}: nothing was compiled ({message})")
    packages = package_store.listed(files)
    folder = package_store.save(packages, target, title=prepared.plan.model)
    return CompiledModel(prepared.plan, folder, choices)
