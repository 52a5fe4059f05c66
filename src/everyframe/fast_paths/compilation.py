"""torch.compile per block, with guards that keep a compiled graph from being stale.

A block is compiled in place: its name, parameters and hooks stay. Torch guards a graph by shapes,
dtypes and plain values, and takes weights as inputs. It guards hooks only on request; repairs and
kernel choices are hooks, so that guard is enabled here. Compilation needs a C++ compiler and takes
minutes, so it runs on request only. `toolchain` checks for the compiler.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shlex
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from everyframe.checkpoints.folder import cache_folder
from everyframe.numerics.fault_locator import Fault
from everyframe.numerics.tensor_stats import iter_tensors, value_range

_log = logging.getLogger(__name__)

#: Environment variable of torch's compile cache folder.
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"

_SCRIPT = """\
#!/bin/sh
# Made by Everyframe: the compiler writes under another name, and what it has done gets its own.
out= part= is_out=
for given do
  shift
  if [ -n "$is_out" ]; then
    is_out=
    case $given in
      /dev/*) ;;
      *) out=$given part=$given.$$.part given=$part ;;
    esac
  elif [ "$given" = -o ]; then
    is_out=1
  fi
  set -- "$@" "$given"
done
{compiler} "$@"
code=$?
[ -n "$out" ] || exit $code
if [ $code -eq 0 ]; then
  mv -f -- "$part" "$out"
else
  rm -f -- "$part"
  exit $code
fi
"""


def prepare() -> None:
    """Set up torch's compile cache in our folder, with a compiler wrapper that writes atomically.

    A cache folder set in the environment is used as it is. Nothing changes without a known
    compiler: torch reports that itself, and on Windows it uses another one.
    """
    import torch._inductor.config

    config: Any = torch._inductor.config
    found = _found(config.cpp.cxx) if os.name == "posix" else None
    if found is None:
        return
    try:
        folder = _cache() / "everyframe" / hashlib.blake2b(found.encode()).hexdigest()[:12]
        if Path(found).parent.parent == folder.parent:
            return  # it stands behind the script already
        script = folder / Path(found).name  # by which torch knows its kind
        _write(script, _SCRIPT.format(compiler=shlex.quote(found)))
    except OSError as error:
        _log.warning(
            "%s: what is compiled is kept as torch does it, and a run that is killed while it "
            "compiles may leave half a library there", error,
        )  # fmt: skip
        return
    config.cpp.cxx = (None, str(script))


def _found(asked: Any) -> str | None:
    """Path of the compiler that torch would use, or of another one that it knows."""
    names = [asked] if isinstance(asked, str) else [name for name in asked if name]
    return next((path for name in (*names, "clang++") if (path := shutil.which(name))), None)


def _cache() -> Path:
    """Create and return torch's cache folder. Raises `OSError`."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # torch names its own there as soon as its compiler is imported.
    named = os.environ.get(CACHE_VARIABLE)
    is_torchs = not named or named == default_cache_dir()
    folder = cache_folder() / "inductor" if is_torchs else Path(named or "")
    folder.mkdir(parents=True, exist_ok=True)
    os.environ[CACHE_VARIABLE] = str(folder.absolute())
    return folder.absolute()


def _write(path: Path, text: str) -> None:
    if path.exists() and path.read_text() == text and os.access(path, os.X_OK):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_text(text)
    unfinished.chmod(0o755)
    os.replace(unfinished, path)


#: Largest difference of a correct graph, as a share of the largest value; bfloat16 rounding is a
#: tenth of it.
_FAR = 0.1


def disable_compiled(module: nn.Module) -> Callable[[], None]:
    """Disable compilation in every submodule; returns a function that enables it again."""
    compiled = [(part, part._compiled_call_impl) for part in module.modules() if is_compiled(part)]
    for part, _ in compiled:
        part._compiled_call_impl = None

    def undo() -> None:
        for part, graph in compiled:
            part._compiled_call_impl = graph

    return undo


def is_compiled(module: nn.Module) -> bool:
    """Whether the module itself is compiled, whatever its submodules are."""
    return module._compiled_call_impl is not None


def find_wrong_graphs(
    parts: Mapping[str, nn.Module], compute: Callable[[], object]
) -> Sequence[Fault]:
    """Find compiled blocks whose result in `compute` is not finite, or far from the eager result.

    Both run on the same inputs, and `compute` continues with the eager result, so one call finds
    all wrong graphs.
    """
    found: dict[tuple[str, str], Fault] = {}
    undo = []

    def judged(part: str, name: str, block: nn.Module, graph: Callable[..., Any]) -> Any:
        as_written: Any = block._call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            result = graph(*args, **kwargs)
            written = as_written(*args, **kwargs)
            if value_range(written).is_finite and _is_far(result, written):
                given = (args, kwargs)
                dtype = next(iter_tensors(result)).dtype
                found[part, name] = Fault(
                    part, name, "a compiled graph", "compiled", dtype, value_range(given),
                    value_range(result), value_range(written),
                )  # fmt: skip
            return written

        return call

    for part, whole in parts.items():
        for name, block in whole.named_modules():
            graph = block._compiled_call_impl
            if graph is not None:
                # Not a hook: one would be a reason to compile the block anew.
                undo.append(disable_compiled(block))
                block._compiled_call_impl = judged(part, name, block, graph)
    try:
        if undo:
            compute()
    finally:
        for each in undo:
            each()
    return [*found.values()]


def _is_far(result: Any, written: Any) -> bool:
    if not value_range(result).is_finite:
        return True
    pairs = zip(iter_tensors(result), iter_tensors(written), strict=True)
    return any(float((a - b).abs().max()) > _FAR * float(b.abs().max()) for a, b in pairs)


def compile_blocks(
    module: nn.Module, names: Iterable[str], backend: str | Callable[..., Any] = "inductor"
) -> None:
    """Compile the submodules with these names in place; the first call of each is slow."""
    if backend == "inductor":
        prepare()
    # torch's switches are made at import, so type checkers see none of them.
    config: Any = torch._dynamo.config
    config.skip_nnmodule_hook_guards = False
    for name in names:
        module.get_submodule(name).compile(backend=backend)
