"""Architecture rules: functions from one parsed module to its violations.

The rules read the source and import nothing. `test_architecture.py` applies them to all files and
shows that each rule can fail. `docs/explanation/architecture.md` describes them in prose.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

#: The packages from the top down. A package imports itself and those below it.
ROOMS = (
    "cli",
    "server",
    "doctor",
    "api",
    "engine",
    "planning",
    "families",
    "diffusers_pipelines",
    "adapters",
    "runs",
    "runtime",
    "fast_paths",
    "dry_run",
    "parallel",
    "numerics",
    "precision",
    "samplers",
    "ops",
    "checkpoints",
    "media",
    "hardware",
    "core",
)
#: Packages that know nothing of each other, though one stands above the other in the list.
SIBLINGS = (("families", "diffusers_pipelines"),)
#: The registry names each family's module as a string and imports it on demand.
BY_NAME = "everyframe.families.registry"

#: Words that name no module, alone or with others: participles, prepositions, words of our own.
NOT_IN_A_NAME = frozenset({
    "ahead", "again", "among", "apart", "asked", "asking", "awaited", "broken", "coming", "cuts",
    "dealing", "dying", "gathering", "given", "handed", "holding", "keeping", "kept",
    "meeting", "moving", "obituary", "patience", "planned", "quiet", "rehearsals", "relieving",
    "reliefs", "remembered", "remembering", "reporting", "resuming", "rounds", "said", "savings",
    "scarce", "settle", "settling", "shortages", "sparing", "staged", "stepping", "telling",
    "told", "turns", "untouched",
})  # fmt: skip
#: Names that say nothing by themselves.
NOT_A_MODULE = frozenset({"empty", "last_words", "moments", "put_on", "sources", "trail"})

MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60

#: Modules and functions that may be longer, each with the reason. Empty is what we want.
LONG_MODULES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}

#: What the ground floor may not import: it holds data, not arithmetic.
NOT_IN_CORE = ("torch", "diffusers", "transformers", "av")

#: What a thread of somebody else would see: calls, by the end of their dotted names.
PROCESS_WIDE = frozenset({
    "filterwarnings", "gc.disable", "np.random.seed", "os.chdir", "os.putenv", "random.seed",
    "register_module_forward_hook", "register_module_forward_pre_hook",
    "register_module_parameter_registration_hook", "simplefilter", "torch.manual_seed",
    "torch.seed", "torch.set_default_device", "torch.set_default_dtype",
    "torch.set_float32_matmul_precision", "torch.set_num_threads", "torch.set_printoptions",
})  # fmt: skip
#: Modules that may change the process, each with the reason.
MAY_CHANGE_THE_PROCESS = {
    "everyframe.cli": "the process is ours",
    "everyframe.core.garbage_collection": "commands and workers only",
    "everyframe.doctor.probes": "runs in a process of its own",
    "everyframe.engine.workers.module_watch": "runs in a process of its own",
    "everyframe.engine.ray.cluster_connection": "what Ray reads on import; its changes are undone",
    "everyframe.engine.ray.rank": "runs in a process of its own",
    "everyframe.engine.workers.worker": "runs in a process of its own",
    "everyframe.fast_paths.compilation.compiler_cache": "torch reads its cache from there",
    "everyframe.fast_paths.certification.trials": "runs in a process of its own",
    "everyframe.hardware.cpu": "the number of this thread; the process's is restored at once",
    "everyframe.hardware.isolation": "the start of a process, under a lock; and in that process",
    "everyframe.parallel.rendezvous": "runs in a process of its own",
    "everyframe.precision.strict_float32": "torch has no other switches; under `hardware.switches`",
    "everyframe.runtime.alternating_thread": "a hook for one thread, after an interrupt",
}

PACKAGE = "everyframe"
_MODULE_NAME = re.compile(rf"{PACKAGE}\.({'|'.join(ROOMS)})(\.[a-z_]\w*)*")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One file of the package: its dotted name, its lines and its syntax tree."""

    name: str
    source: str
    tree: ast.Module

    @classmethod
    def parse(cls, name: str, source: str) -> Module:
        """Read it as the oldest Python that we support would."""
        return cls(name, source, ast.parse(source, filename=name, feature_version=(3, 10)))

    @property
    def room(self) -> str | None:
        """``families`` of ``everyframe.families.opensora.vae``; None for the roof itself."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 and parts[1] in ROOMS else None

    @property
    def may_speak(self) -> bool:
        """Whether it may print and exit: the command line and ``python -m`` only."""
        return self.room == "cli" or self.name == f"{PACKAGE}.__main__"

    @cached_property
    def every_node(self) -> tuple[ast.AST, ...]:
        """All of the tree; a dozen rules walk through it."""
        return tuple(ast.walk(self.tree))

    def nodes(self, *kinds: type[ast.AST]) -> Iterator[ast.AST]:
        """Every node of these kinds."""
        return (node for node in self.every_node if isinstance(node, kinds))

    @cached_property
    def imports(self) -> tuple[tuple[int, str], ...]:
        """(line, dotted name) of all that is imported, also in functions."""
        found = []
        for node in self.nodes(ast.Import, ast.ImportFrom):
            if isinstance(node, ast.Import):
                found += [(node.lineno, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
        return tuple(found)

    @cached_property
    def named_modules(self) -> tuple[tuple[int, str], ...]:
        """(line, dotted name) of our modules that strings name, docstrings apart."""
        docstrings = {id(node.value) for node in self.nodes(ast.Expr)}
        return tuple(
            (node.lineno, node.value)
            for node in self.nodes(ast.Constant)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
            if id(node) not in docstrings and _MODULE_NAME.fullmatch(node.value)
        )

    @property
    def references(self) -> tuple[tuple[int, str], ...]:
        """`imports` and `named_modules`."""
        return (*self.imports, *self.named_modules)


Rule = Callable[[Module], Iterator[str]]


def _dotted(node: ast.AST) -> str:
    """``a.b.c`` of a name or of attributes of a name; else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def imports_go_down(module: Module) -> Iterator[str]:
    """A room imports itself and the rooms below it; nobody imports the roof, nor relatively."""
    for node in module.nodes(ast.ImportFrom):
        assert isinstance(node, ast.ImportFrom)
        if node.level:
            yield f"{node.lineno}: relative import; write the whole name"
    if module.room is None:
        return
    allowed = ROOMS[ROOMS.index(module.room) :]
    for line, name in module.references:
        parts = name.split(".")
        if parts[0] != PACKAGE or name == f"{PACKAGE}._version.__version__":
            continue
        room = parts[1] if len(parts) > 1 else "the package itself"
        if room not in allowed:
            yield f"{line}: {module.room} imports {name}; it may import {', '.join(allowed)}"
        elif module.name != BY_NAME and any({module.room, room} == {*pair} for pair in SIBLINGS):
            yield f"{line}: {module.room} imports {name}; the two know nothing of each other"


def modules_have_searchable_names(module: Module) -> Iterator[str]:
    """A module's name is a noun of the field, not a participle, a preposition or our own word."""
    name = module.name.rpartition(".")[2].removeprefix("test_")
    if name in NOT_A_MODULE or not NOT_IN_A_NAME.isdisjoint(name.split("_")):
        yield f"1: {name} says nothing to somebody who searches; name it by its subject"


def families_stand_alone(module: Module) -> Iterator[str]:
    """A family's folder imports no other family's; what two of them need is a room of its own."""
    parts = module.name.split(".")
    if module.room != "families" or len(parts) < 4:
        return
    for line, name in module.references:
        other = name.split(".")
        # Modules that lie in families/ itself are shared; only folders hold a family.
        if other[:2] == parts[:2] and len(other) > 4 and other[2] != parts[2]:
            yield f"{line}: family {parts[2]} imports family {other[2]}"


def core_is_plain_data(module: Module) -> Iterator[str]:
    """The ground floor imports no tensors, and its dataclasses are frozen."""
    if module.room != "core":
        return
    for line, name in module.references:
        if name.split(".")[0] in NOT_IN_CORE:
            yield f"{line}: core imports {name}"
    for node in module.nodes(ast.ClassDef):
        assert isinstance(node, ast.ClassDef)
        for decorator in node.decorator_list:
            keywords = decorator.keywords if isinstance(decorator, ast.Call) else []
            called = decorator.func if isinstance(decorator, ast.Call) else decorator
            frozen = any(
                keyword.arg == "frozen" and getattr(keyword.value, "value", None) is True
                for keyword in keywords
            )
            if _dotted(called).endswith("dataclass") and not frozen:
                yield f"{node.lineno}: dataclass {node.name} is not frozen"


def modules_are_short(module: Module) -> Iterator[str]:
    """One subject a module, in at most `MAX_MODULE_LINES` lines."""
    num_lines = len(module.source.splitlines())
    if num_lines > MAX_MODULE_LINES and module.name not in LONG_MODULES:
        yield f"1: {num_lines} lines; at most {MAX_MODULE_LINES}"


def functions_are_short(module: Module) -> Iterator[str]:
    """At most `MAX_FUNCTION_LINES` lines from `def` to the end, docstring included."""
    for node in module.nodes(ast.FunctionDef, ast.AsyncFunctionDef):
        assert isinstance(node, Function)
        num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if num_lines > MAX_FUNCTION_LINES and f"{module.name}:{node.name}" not in LONG_FUNCTIONS:
            yield f"{node.lineno}: {node.name} has {num_lines} lines; at most {MAX_FUNCTION_LINES}"


def modules_say_what_they_are(module: Module) -> Iterator[str]:
    """A docstring on top; annotations are not evaluated, so that Python 3.10 can read them."""
    if not ast.get_docstring(module.tree):
        yield "1: no module docstring"
    has_code = any(
        module.nodes(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.AnnAssign)
    )
    has_future = any(
        isinstance(node, ast.ImportFrom)
        and node.module == "__future__"
        and any(alias.name == "annotations" for alias in node.names)
        for node in module.tree.body
    )
    if has_code and not has_future:
        yield "1: no `from __future__ import annotations`"


def public_things_have_docstrings(module: Module) -> Iterator[str]:
    """Every public function and class of a module has one."""
    for node in module.tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            if not node.name.startswith("_") and not ast.get_docstring(node):
                yield f"{node.lineno}: {node.name} has no docstring"


def the_library_is_silent(module: Module) -> Iterator[str]:
    """No printing and no exit outside the command line."""
    if module.may_speak:
        return
    for node in module.every_node:
        name = ""
        if isinstance(node, ast.Call):
            name = _dotted(node.func)
        elif isinstance(node, ast.Raise) and node.exc is not None:
            raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            name = _dotted(raised)
        if name in ("print", "exit", "quit", "SystemExit", "sys.exit", "os._exit", "os.abort"):
            yield f"{node.lineno}: {name} outside the command line"
        elif name.startswith(("sys.stdout.", "sys.stderr.")):
            yield f"{node.lineno}: writes to {name.rsplit('.', 1)[0]} outside the command line"


def _is_broad(kind: ast.expr | None) -> bool:
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(each is None or _dotted(each) in ("Exception", "BaseException") for each in kinds)


def no_error_is_swallowed(module: Module) -> Iterator[str]:
    """No bare `except`, no handler that does nothing, no suppressing of everything."""
    for node in module.every_node:
        if isinstance(node, ast.ExceptHandler):
            idle = all(
                isinstance(line, (ast.Pass, ast.Continue))
                or (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
                for line in node.body
            )
            if node.type is None:
                yield f"{node.lineno}: bare except"
            elif idle and (_is_broad(node.type) or isinstance(node.body[-1], ast.Pass)):
                yield f"{node.lineno}: except that does nothing"
        elif isinstance(node, ast.Call) and _dotted(node.func).endswith("suppress"):
            if any(_is_broad(kind) for kind in node.args):
                yield f"{node.lineno}: suppresses every error"


def nothing_is_unpickled(module: Module) -> Iterator[str]:
    """`torch.load` with `weights_only=True` written out, and no other way to unpickle."""
    for node in module.nodes(ast.Call):
        assert isinstance(node, ast.Call)
        name = _dotted(node.func)
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        if name == "torch.load":
            if getattr(given.get("weights_only"), "value", None) is not True:
                yield f"{node.lineno}: torch.load without weights_only=True"
        elif name.startswith(("dist.", "torch.distributed.")) and "_object" in name:
            yield f"{node.lineno}: {name} unpickles what another rank sent"
        elif name in ("pickle.load", "pickle.loads", "joblib.load"):
            yield f"{node.lineno}: {name} runs whatever the file says"
        elif getattr(given.get("allow_pickle"), "value", False) is not False:
            yield f"{node.lineno}: allow_pickle runs whatever the file says"


def precision_is_by_construction(module: Module) -> Iterator[str]:
    """No autocast, under any of its names, but where somebody else's is carried or turned off."""
    if module.name == f"{PACKAGE}.hardware.thread_state":
        return
    for node in module.every_node:
        name = getattr(node, "attr", None) or getattr(node, "id", None)
        if isinstance(node, ast.alias):
            name = node.name.rsplit(".", 1)[-1]
        if isinstance(name, str) and "autocast" in name.lower():
            yield f"{getattr(node, 'lineno', 1)}: autocast"


def methods_are_not_assigned(module: Module) -> Iterator[str]:
    """Models are changed by hooks and by swapping children, never by giving them another method."""
    names = ("forward", "__call__")
    for node in module.every_node:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(target, ast.Attribute) and target.attr in names for target in targets):
            yield f"{node.lineno}: assigns a method"
        if isinstance(node, ast.Call) and _dotted(node.func) == "setattr" and len(node.args) > 1:
            if getattr(node.args[1], "value", None) in names:
                yield f"{node.lineno}: assigns a method"


def nothing_is_mocked(module: Module) -> Iterator[str]:
    """No test library: what a caller or another thread sees is not replaced for a moment."""
    for line, name in module.imports:
        if name.partition(".")[0] in ("unittest", "mock", "pytest"):
            yield f"{line}: imports {name}"


def the_process_is_left_alone(module: Module) -> Iterator[str]:
    """Nothing that all threads share is changed: no attribute of a foreign module, no switch."""
    if any(f"{module.name}.".startswith(f"{each}.") for each in MAY_CHANGE_THE_PROCESS):
        return
    foreign = {
        alias.asname or alias.name.partition(".")[0]
        for node in module.nodes(ast.Import)
        for alias in getattr(node, "names", ())
    }
    for node in module.every_node:
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in targets:
            held = target.value if isinstance(target, (ast.Attribute, ast.Subscript)) else None
            if held is not None and _dotted(held).partition(".")[0] in foreign:
                yield f"{node.lineno}: changes {_dotted(held)}, which all threads share"
        if isinstance(node, ast.Call):
            name = _dotted(node.func)
            if any(f".{name}".endswith(f".{each}") for each in PROCESS_WIDE):
                yield f"{node.lineno}: {name} changes it for all threads"


RULES: tuple[Rule, ...] = (
    imports_go_down,
    families_stand_alone,
    modules_have_searchable_names,
    core_is_plain_data,
    modules_are_short,
    functions_are_short,
    modules_say_what_they_are,
    public_things_have_docstrings,
    the_library_is_silent,
    no_error_is_swallowed,
    nothing_is_unpickled,
    precision_is_by_construction,
    methods_are_not_assigned,
    nothing_is_mocked,
    the_process_is_left_alone,
)
