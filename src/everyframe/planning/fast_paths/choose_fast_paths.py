"""Choose the fast paths of each component from certificates, request options and known issues.

A path is used if a certificate for this device, driver, model and size allows it, or if the request
pins it. Otherwise the component uses the default kernels. A plan that is only shown lists untried
paths as expected. `everyframe.fast_paths.certification.certify` makes certificates;
`everyframe.fast_paths.apply` applies paths to a module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec

from everyframe.core.errors import InputError, MissingPackageError
from everyframe.core.facts import DeviceFacts
from everyframe.core.plan import FastPathChoice, Precision
from everyframe.core.quality import PRODUCTS
from everyframe.core.request import DTYPES, Request
from everyframe.fast_paths.certificates import Certificate, find
from everyframe.fast_paths.computing_time import computing_time
from everyframe.fast_paths.registry import (
    BF16_DECODER,
    CATALOGUE,
    PRECISIONS,
    FastPath,
    check_kernel,
    for_device,
    kernel_of,
    path_of_kernel,
    switched_off,
)
from everyframe.planning.dry_runs import DryRun, largest_scores
from everyframe.planning.fast_paths.blocked_paths import BlockedPaths, tags_of
from everyframe.planning.fast_paths.component_certificates import (
    RECORDED,
    Certificates,
    is_very_long,
    operations,
)
from everyframe.runtime.interface import Component

#: Verdicts that enable a path.
USED = ("certified", "pinned", "expected")

#: Verdicts that disable a path whatever a trial shows.
_AGAINST = ("avoided", "off")

#: Paths of which a component uses one.
_EITHER = ("compile", "cached-constants")

#: Reason of an expected path.
_FIRST = "the first run tries it"

#: Compilation needs at least this many calls of a component and, unless it is requested or already
#: compiled, this many operations in a run: minutes on a CPU, about what compiling takes.
_AGAIN_AND_AGAIN = 4


@dataclass(frozen=True)
class FastPathOptions:
    """Fast-path options of a request.

    Attributes:
        dtype: requested dtype.
        kernel: pinned attention kernel.
        off: disabled paths.
        compile: whether to compile.
        exact: paths of each component from a record. No others are used, and these only if they are
            certified here, since a record is untrusted.
        force: use the paths of `exact` without a certificate.
    """

    dtype: str = "auto"
    kernel: str | None = None
    off: frozenset[str] = frozenset()
    compile: bool = False
    exact: Mapping[str, tuple[str, ...]] | None = None
    force: bool = False


def pins_of(request: Request, device: DeviceFacts, *, is_here: bool) -> FastPathOptions:
    """Fast-path options of a request for that device, of this machine or (not `is_here`) another.

    Raises:
        InputError: no kernel or path of that name; names the nearest. Or a folder of compiled
            blocks that this device didn't compile. Or products in eight bits of compiled blocks. Or
            a path is requested and disabled.
        MissingPackageError: products in eight bits are requested, and torchao isn't installed.
    """
    products = {request.quantize, *(request.quantized or {}).values()} & PRODUCTS.keys()
    for kind in sorted(products):
        if request.compile or request.compiled is not None:
            raise InputError(f"quantize={kind} and compile: give one of them; blocks are compiled "
                             "with their layers as they are")  # fmt: skip
        if is_here and not has_torchao():
            raise MissingPackageError(f"{kind} needs torchao: pip install 'everyframe[torchao]'")
    if request.compiled is not None and is_here:
        # Late import: brings torch.
        from everyframe.fast_paths.compilation.package_store import check

        check(request.compiled, device.torch_name)
    kernel = None if request.attention is None else check_kernel(request.attention, device)
    # Of one request alone: the variable is for every run, whatever these ask for.
    off = {name.strip().casefold() for name in request.disable}
    if kernel is not None and path_of_kernel(kernel) in off:
        raise InputError(f"attention={kernel} and disable={path_of_kernel(kernel)}: give one of "
                         "them")  # fmt: skip
    is_compiled = request.compile or request.compiled is not None
    if is_compiled and "compile" in off:
        raise InputError("compile and disable=compile: give one of them")
    return FastPathOptions(
        dtype=DTYPES[request.dtype],
        kernel=kernel,
        off=switched_off(request.disable),
        compile=is_compiled,
        exact=request.fast_paths,
        force=request.force,
    )


def has_torchao() -> bool:
    """Whether torchao is installed, which has the products in eight bits."""
    return find_spec("torchao") is not None


@dataclass(frozen=True)
class FastPathChooser:
    """Choose fast paths of components.

    Attributes:
        device: the target device.
        pins: options of the request.
        certificates: None for a machine that is not this one.
        known: paths blocked by known issues.
        expects: list untried paths as expected: the plan is only shown, or is for another machine.
        num_threads: CPU threads, each of which has scratch of its own in some paths.
    """

    device: DeviceFacts
    pins: FastPathOptions = FastPathOptions()
    certificates: Certificates | None = None
    known: BlockedPaths = field(default_factory=BlockedPaths)
    expects: bool = True
    num_threads: int = 1

    def dtype(
        self,
        component: Component,
        by_facts: Precision,
        runs: Sequence[DryRun],
        *,
        may_try: bool = True,
    ) -> tuple[str, tuple[FastPathChoice, ...]]:
        """Compute dtype of a component and the verdicts behind it; device facts suggest `by_facts`.

        `runs` are dry runs in that precision. If there is nothing to try it on (not `may_try`), it
        is used unless something blocks it; in a decoder that was made for float32 it is not. A
        component that computes nothing, as a motion adapter that a UNet has copied, stays float32.
        """
        name = _precision(by_facts)
        if name is None or self._is_given(component):
            return by_facts.compute, self._check_pinned(component, name, runs)
        if runs and not operations(runs):
            return "float32", ()
        if component.needs.decoder_islands:
            name = BF16_DECODER
            if not may_try:
                return "float32", ()
        certificates = self._certificates(component.name, by_facts, runs)
        choice = self._judge(component.name, CATALOGUE[name], certificates, runs)
        if not may_try and (self.pins.exact is not None or choice.verdict not in _AGAINST):
            return by_facts.compute, ()
        return (by_facts.compute if choice.verdict in USED else "float32"), (choice,)

    def _is_given(self, component: Component) -> bool:
        """Whether the dtype is fixed: requested, or that of weights already loaded."""
        return self.pins.dtype != "auto" or component.has_precision is not None

    def _check_pinned(
        self, component: Component, name: str | None, runs: Sequence[DryRun]
    ) -> tuple[FastPathChoice, ...]:
        """What blocks a fixed precision, if anything does."""
        against = name and self.known.against(name, tags_of(component.name, runs))
        if not name or not against:
            return ()
        why = "as it was loaded" if component.has_precision else f"by --dtype {name}"
        return (FastPathChoice(name, "pinned", why, despite=against),)

    def choices(
        self, component: str, precision: Precision, runs: Sequence[DryRun]
    ) -> tuple[FastPathChoice, ...]:
        """Verdicts on every path except precisions, best first; empty if nothing is known."""
        if not runs:
            return self._blindly(component)
        if not operations(runs):
            return ()
        keys = self._keys(component, precision, runs)
        certificates = find(*keys) if keys else {}
        paths = candidates(runs, self.device, precision.weight_dtype)
        are_tried = all(path.name in certificates for path in paths if path.in_long_runs)
        trial = "" if are_tried else self._trial(runs, keys)
        found = [
            self._judge(component, path, certificates, runs, trial)
            for path in paths
            if not path.on_demand or self._demands(component, path, runs, certificates)
        ]
        found = self._keep_one(found)
        return tuple(sorted(found, key=lambda choice: -(choice.gain or 0.0)))

    def _keep_one(self, found: Sequence[FastPathChoice]) -> list[FastPathChoice]:
        """The same, without the slower one of compiled blocks and constants once a video.

        Compiled blocks compute everything in each step. If they are requested, or in a record, they
        stay.
        """
        gains = {each.path: each.gain or 0.0 for each in found if each.verdict in USED}
        if not {*_EITHER} <= gains.keys():
            return [*found]
        stays = max(_EITHER, key=lambda name: gains[name])
        if self.pins.compile or self.pins.exact is not None:
            stays = "compile"
        why = "compiled blocks compute constants in each step"
        if stays != "compile":
            why = f"{stays} gains more, and {why}"
        return [
            replace(each, verdict="off", reason=why)
            if each.path in _EITHER and each.path != stays
            else each
            for each in found
        ]

    def _trial(self, runs: Sequence[DryRun], keys: tuple[str, str] | None) -> str:
        """Why the next run tries kernels of long runs; empty if it does not."""
        if is_very_long(runs):
            return _FIRST
        past = computing_time(*keys) if keys and self.expects else 0.0
        if not is_very_long(runs, past):
            return ""
        return f"the next run tries it: such runs have computed for {past:.0f} s without it"

    def products(
        self, component: str, precision: Precision, runs: Sequence[DryRun]
    ) -> FastPathChoice:
        """The verdict on products in eight bits, which were requested."""
        path = CATALOGUE[precision.weight_dtype]
        choice = self._judge(component, path, self._certificates(component, precision, runs), runs)
        is_right = choice.error is not None and choice.error <= (choice.limit or 0.0)
        if self.pins.force and choice.verdict == "refused" and is_right:
            return replace(choice, verdict="pinned", reason=f"by --force: {choice.reason}")
        return choice

    def on_demand(self, component: str, runs: Sequence[DryRun]) -> tuple[FastPathChoice, ...]:
        """On-demand paths that could be requested for a component, for a list of all paths."""
        own = [run for run in runs if run.stage_call.component == component]
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
        keys = self._keys(component, precision, runs)
        return find(*keys) if keys else {}

    def _keys(
        self, component: str, precision: Precision, runs: Sequence[DryRun]
    ) -> tuple[str, str] | None:
        """Keys of the component's certificates; None if it can't have any."""
        if self.certificates is None or not runs:
            return None
        return self.certificates.subject(component, precision, runs).keys

    def _blindly(self, component: str) -> tuple[FastPathChoice, ...]:
        """Paths requested by name, for a component whose sizes are unknown before it runs."""
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
        trial: str = "",
    ) -> FastPathChoice:
        """The verdict on a path; `trial` says why the next run tries kernels of long runs."""
        pins = self.pins
        against = self.known.against(path.name, tags_of(component, runs))
        if path.name in pins.off:
            return FastPathChoice(path.name, "off", "disabled by --disable or EVERYFRAME_DISABLE")
        is_recorded = self._is_recorded(component, path)
        if pins.exact is not None and not is_recorded:
            return FastPathChoice(path.name, "off", "not in the record")
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
        why = trial if path.in_long_runs else _FIRST if path.at_once or path.on_demand else ""
        if self.expects and why:
            return FastPathChoice(path.name, "expected", RECORDED if is_recorded else why)
        return FastPathChoice(path.name, "untried", "not tried yet")

    def _demands(
        self,
        component: str,
        path: FastPath,
        runs: Sequence[DryRun],
        certificates: Mapping[str, Certificate],
    ) -> bool:
        """Whether an on-demand path is requested, or known to pay here.

        A record alone starts no compiler; paths that are certified here already are used.
        """
        if self.pins.exact is not None:
            return self._is_recorded(component, path) and path.name in certificates
        if _num_calls(runs) < _AGAIN_AND_AGAIN:
            return False
        certificate = certificates.get(path.name)
        is_here = certificate is not None and bool(certificate.packages)
        pays = is_here or (certificate is not None and is_very_long(runs))
        return self.pins.compile or pays

    def _is_recorded(self, component: str, path: FastPath) -> bool:
        return self.pins.exact is not None and path.name in self.pins.exact.get(component, ())


def of_certificate(certificate: Certificate) -> FastPathChoice:
    """The verdict of a certificate on its path."""
    is_here = certificate.packages and certificate.verdict == "certified"
    return FastPathChoice(
        certificate.what,
        certificate.verdict,
        f"{certificate.reason}; compiled already" if is_here else certificate.reason,
        certificate.error,
        certificate.limit,
        certificate.gain,
    )


def _precision(precision: Precision) -> str | None:
    """The path name of a precision; None for float32."""
    return next((name for name, dtype in PRECISIONS.items() if dtype == precision.compute), None)


def candidates(
    runs: Sequence[DryRun], device: DeviceFacts, weight_dtype: str = ""
) -> tuple[FastPath, ...]:
    """Paths other than precisions that suit the device, the computation and quantized weights."""
    has_attention = any(
        product.kind == "attention" for run in runs for product, _ in run.found.work.products
    )
    return tuple(
        path
        for path in for_device(device)
        if path.group not in ("precision", "products")
        and (path.group != "attention" or has_attention)
        and (path.group != "compile" or weight_dtype not in PRODUCTS)
        and runs[0].has_place(path.name, is_quantized=bool(weight_dtype))
    )


def _num_calls(runs: Sequence[DryRun]) -> float:
    return max(run.stage_call.num_calls for run in runs)


def used(choices: Sequence[FastPathChoice]) -> tuple[str, ...]:
    """Names of the paths to apply, in order."""
    return tuple(choice.path for choice in choices if choice.verdict in USED)


def score_bytes(runs: Sequence[DryRun], paths: Sequence[str] | None) -> int:
    """Bytes of attention scores if no fused attention kernel is used."""
    if paths is None or any(kernel_of(path) for path in paths):
        return 0
    return largest_scores(runs)
