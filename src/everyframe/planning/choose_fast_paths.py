"""Which fast paths each component runs by: what is certified, less what is off, and why.

A path is used if a certificate for this very device, driver, model and size says so, or if the
person who asked pinned it; else the plain way is taken. A plan that nobody runs yet tells what it
expects of the paths that were not tried. Not here: how certificates are made
(`everyframe.fast_paths.certify`) and put on a module (`everyframe.fast_paths.apply`). Read next:
`memory_fit.py`, which asks; `component_certificates.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from everyframe.core.facts import DeviceFacts
from everyframe.core.plan import FastPathChoice, Precision
from everyframe.core.request import DTYPES, Request
from everyframe.fast_paths.certificates import Certificate
from everyframe.fast_paths.registry import (
    CATALOGUE,
    PRECISIONS,
    FastPath,
    check_kernel,
    for_device,
    kernel_of,
    path_of_kernel,
    switched_off,
)
from everyframe.planning.blocked_paths import BlockedPaths, tags_of
from everyframe.planning.component_certificates import RECORDED, Certificates, operations
from everyframe.planning.dry_runs import DryRun, largest_scores
from everyframe.runtime.interface import Component

#: Verdicts with which a path is used.
USED = ("certified", "pinned", "expected")

#: Verdicts that keep a path from being used whatever a trial would say.
_AGAINST = ("avoided", "off")

#: A component that is called fewer times is not compiled, and one that computes less in a run only
#: if that is asked for: minutes on a CPU, which compiling takes too.
_AGAIN_AND_AGAIN, _VERY_LONG = 4, 1e14


@dataclass(frozen=True)
class FastPathOptions:
    """What the person who asked wants of the paths: a kernel of attention, some off, `compile`.

    `exact` are those of each component, as a record has them: no others are used, and these where
    they are certified here, as a record is somebody's word, unless the person says so by `force`.
    `dtype` is that of the request.
    """

    dtype: str = "auto"
    kernel: str | None = None
    off: frozenset[str] = frozenset()
    compile: bool = False
    exact: Mapping[str, tuple[str, ...]] | None = None
    force: bool = False


def pins_of(request: Request, device: DeviceFacts) -> FastPathOptions:
    """The wishes of a request for that device.

    Raises:
        InputError: no kernel or path of that name; names the nearest.
    """
    kernel = request.attention
    return FastPathOptions(
        dtype=DTYPES[request.dtype],
        kernel=None if kernel is None else check_kernel(kernel, device),
        off=switched_off(request.without),
        compile=request.compile,
        exact=request.paths,
        force=request.force,
    )


@dataclass(frozen=True)
class FastPathChooser:
    """Chooses by certificates; None stands for a machine that is not here, which has none.

    `expects` is whether untried paths are told as expected: the plan is shown and not run, or is
    of a machine that is not here. `known` is what stands against paths whatever was tried.
    """

    device: DeviceFacts
    pins: FastPathOptions = FastPathOptions()
    certificates: Certificates | None = None
    known: BlockedPaths = field(default_factory=BlockedPaths)
    expects: bool = True

    def dtype(
        self,
        component: Component,
        by_facts: Precision,
        runs: Sequence[DryRun],
        *,
        may_try: bool = True,
    ) -> tuple[str, tuple[FastPathChoice, ...]]:
        """The dtype to compute in where the facts of the device say `by_facts`, and why.

        `runs` are the dry runs in that precision. One that there is nothing to try on (not
        `may_try`) is taken unless something stands against it.
        """
        name = _precision(by_facts)
        if name is None or self._is_given(component):
            return by_facts.compute, self._given(component, name, runs)
        certificates = self._certificates(component.name, by_facts, runs)
        choice = self._judge(component.name, CATALOGUE[name], certificates, runs)
        if not may_try and (self.pins.exact is not None or choice.verdict not in _AGAINST):
            return by_facts.compute, ()
        return (by_facts.compute if choice.verdict in USED else "float32"), (choice,)

    def _is_given(self, component: Component) -> bool:
        """Whether nothing is chosen: a dtype is asked for, or its weights are there in theirs."""
        return self.pins.dtype != "auto" or component.has_precision is not None

    def _given(
        self, component: Component, name: str | None, runs: Sequence[DryRun]
    ) -> tuple[FastPathChoice, ...]:
        """What stands against a precision that nobody chose here, if anything does."""
        against = name and self.known.against(name, tags_of(component.name, runs))
        if not name or not against:
            return ()
        why = "as it was loaded" if component.has_precision else f"by --dtype {name}"
        return (FastPathChoice(name, "pinned", why, despite=against),)

    def choices(
        self, component: str, precision: Precision, runs: Sequence[DryRun]
    ) -> tuple[FastPathChoice, ...]:
        """What came of every path but precisions, best first; none where nothing is known."""
        if not runs:
            return self._blindly(component)
        certificates = self._certificates(component, precision, runs)
        found = [
            self._judge(component, path, certificates, runs)
            for path in candidates(runs, self.device, is_quantised=bool(precision.weights))
            if not path.on_demand or self._demands(component, path, runs, certificates)
        ]
        return tuple(sorted(found, key=lambda choice: -(choice.gain or 0.0)))

    def on_demand(self, component: str, runs: Sequence[DryRun]) -> tuple[FastPathChoice, ...]:
        """Paths that nobody demands, but could, for a component; for a list of all there are."""
        own = [run for run in runs if run.rehearsal.component == component]
        if self.pins.compile or not own or _num_calls(own) < _AGAIN_AND_AGAIN:
            return ()
        found = []
        for path in candidates(own, self.device):
            against = self.known.against(path.name, tags_of(component, own))
            if path.on_demand and against is not None:
                found.append(FastPathChoice(path.name, "avoided", against))
            elif path.on_demand and path.name not in self.pins.off:
                found.append(FastPathChoice(path.name, "untried", f"on demand: --{path.name}"))
        return tuple(found)

    def _certificates(
        self, component: str, precision: Precision, runs: Sequence[DryRun]
    ) -> Mapping[str, Certificate]:
        if self.certificates is None or not runs:
            return {}
        return self.certificates.of(component, precision, runs)

    def _blindly(self, component: str) -> tuple[FastPathChoice, ...]:
        """What was asked for by name, for a component whose sizes nobody knows before it runs."""
        return tuple(
            choice
            for path in for_device(self.device)
            if path.group == "attention"
            for choice in (self._judge(component, path, {}, ()),)
            if choice.verdict == "pinned"
        )

    def _judge(
        self,
        component: str,
        path: FastPath,
        certificates: Mapping[str, Certificate],
        runs: Sequence[DryRun],
    ) -> FastPathChoice:
        pins = self.pins
        against = self.known.against(path.name, tags_of(component, runs))
        if path.name in pins.off:
            return FastPathChoice(path.name, "off", "turned off: --without, EVERYFRAME_WITHOUT")
        is_recorded = self._exactly(component, path)
        if pins.exact is not None and not is_recorded:
            return FastPathChoice(path.name, "off", "the record does without")
        if is_recorded and pins.force:
            return FastPathChoice(path.name, "pinned", "by --force", despite=against)
        if path.group == "attention" and pins.kernel is not None:
            why = f"by --attention {pins.kernel}"
            if path.name == path_of_kernel(pins.kernel):
                return FastPathChoice(path.name, "pinned", why, despite=against)
            return FastPathChoice(path.name, "off", why)
        if against is not None:
            return FastPathChoice(path.name, "avoided", against)
        if path.name in certificates:
            return of_certificate(certificates[path.name])
        if self.expects and (path.at_once or path.on_demand):
            return FastPathChoice(
                path.name, "expected", RECORDED if is_recorded else "a first run tries it"
            )
        return FastPathChoice(path.name, "untried", "not tried yet")

    def _demands(
        self,
        component: str,
        path: FastPath,
        runs: Sequence[DryRun],
        certificates: Mapping[str, Certificate],
    ) -> bool:
        """Whether a path that is for demand alone is asked for, or known to pay here.

        A record alone does not set a compiler to work: it has what is certified here already.
        """
        if self.pins.exact is not None:
            return self._exactly(component, path) and path.name in certificates
        if _num_calls(runs) < _AGAIN_AND_AGAIN:
            return False
        return self.pins.compile or (path.name in certificates and operations(runs) >= _VERY_LONG)

    def _exactly(self, component: str, path: FastPath) -> bool:
        return self.pins.exact is not None and path.name in self.pins.exact.get(component, ())


def of_certificate(certificate: Certificate) -> FastPathChoice:
    """What a certificate says of its path."""
    return FastPathChoice(
        certificate.what,
        certificate.verdict,
        certificate.reason,
        certificate.error,
        certificate.limit,
        certificate.gain,
    )


def _precision(precision: Precision) -> str | None:
    """The path that a precision is; None for float32."""
    return next((name for name, dtype in PRECISIONS.items() if dtype == precision.compute), None)


def candidates(
    runs: Sequence[DryRun], device: DeviceFacts, *, is_quantised: bool = False
) -> tuple[FastPath, ...]:
    """The paths beside precisions that make sense, by the device and by what is computed."""
    has_attention = any(
        product.kind == "attention" for run in runs for product, _ in run.found.work.products
    )
    return tuple(
        path
        for path in for_device(device)
        if path.group != "precision"
        and (path.group != "attention" or has_attention)
        and runs[0].has_place(path.name, is_quantised=is_quantised)
    )


def _num_calls(runs: Sequence[DryRun]) -> float:
    return max(run.rehearsal.num_calls for run in runs)


def used(choices: Sequence[FastPathChoice]) -> tuple[str, ...]:
    """The names of the paths to put on, in the order of their use."""
    return tuple(choice.path for choice in choices if choice.verdict in USED)


def score_bytes(runs: Sequence[DryRun], paths: Sequence[str] | None) -> int:
    """What the plain attention holds beside everything else, where no other kernel is used."""
    if paths is None or any(kernel_of(path) for path in paths):
        return 0
    return largest_scores(runs)


def fast_path_notes(
    title: str, choices: Sequence[FastPathChoice], precision: Precision
) -> tuple[str, ...]:
    """What the person should know: each path that was refused or is avoided, with its reason.

    And each that is taken although a known issue is about it.
    """
    lines = []
    for choice in choices:
        if choice.despite:
            what = precision.compute if choice.path in PRECISIONS else choice.path
            lines.append(f"{title}: {what}, {choice.reason}, in spite of {choice.despite}")
        if choice.verdict in ("refused", "avoided"):
            says = choice.verdict if choice.verdict == "refused" else "is avoided"
            if choice.path in PRECISIONS:
                lines.append(f"{title}: {precision.compute}, as {choice.path} {_was(says)} here: "
                            f"{choice.reason}")  # fmt: skip
            elif choice.verdict == "avoided" or _is_news(choice):
                lines.append(f"{title}: without {choice.path}, which {_was(says)} here: "
                            f"{choice.reason}")  # fmt: skip
    return tuple(lines)


def _is_news(choice: FastPathChoice) -> bool:
    """Whether a refusal is told: not that something is just no faster, unless it was asked for."""
    return CATALOGUE[choice.path].on_demand or "no faster" not in choice.reason


def _was(says: str) -> str:
    return says if says.startswith("is ") else f"was {says}"
