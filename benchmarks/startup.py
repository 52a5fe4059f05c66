"""What does it take to begin: `plan`, and the first event of `generate`?

    python benchmarks/startup.py                       # four minutes
    python benchmarks/startup.py --beside OLD/src      # an older source tree by turns with this one

Everything is a process of its own, and what counts is the processor time of its whole tree (user
and system), which a busy machine changes little; what a round measures is divided by what
`import torch, diffusers` takes in the same round. The floor is torch with what the embedded model
needs of transformers and diffusers: T5's encoder, a tokenizer, the autoencoder. `plan` and
`generate` run on the embedded model, each with an empty cache folder (the first run ever) and then
with the one that this left (the second). A second table says where a plan's time goes: one process
does one thing after the other, with the cache empty. Needs /proc, so Linux.

Bars: the first event of `generate` at most 1.5 times the floor, and `plan` half of what it was.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path

from result_pages import compose_page, make_parser, publish

SOURCE = Path(__file__).parent.parent / "src"
PROMPT = "a red circle moves to the right on a blue background"

UNIT = "import torch, diffusers"
NEEDS = (
    "import torch; from transformers import AutoTokenizer, T5EncoderModel; "
    "from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL"
)
FLOOR = "torch, T5, tokenizer, autoencoder"
BAR = 1.5

#: One process does these one after the other; each is a line of the second table.
STEPS = {
    "import the command line": "import everyframe.cli.plan",
    "read the request": "from everyframe.core.request import Request\n"
    f"request = Request(prompt={PROMPT!r}, seed=1)",
    "import the resolver": "from everyframe.planning import resolve",
    "facts of the machine": "from everyframe.hardware import machine_facts\nmachine_facts()",
    "import torch": "import torch",
    "import T5 of transformers": "from transformers import T5EncoderModel",
    "import the autoencoder of diffusers": "import everyframe.families.opensora.vae",
    "import the engine": "import everyframe.engine.run",
    "plan": "prepared = resolve.prepare(request, will_run=True)",
    "speed of the machine": "resolve.resolve(request)",
    "check the weights' headers": "from everyframe.runtime.loading import check_contents\n"
    "check_contents(prepared.model)",
}
_TIMED = """
import json, time
steps, took, names = json.loads({steps!r}), {{}}, {{}}
for name, code in steps.items():
    began = time.process_time()
    exec(code, names)
    took[name] = time.process_time() - began
print(json.dumps(took))
"""


def spent(command: list[str], env: Mapping[str, str]) -> float:
    """Processor seconds of a command with all of its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        command, env=env, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _tree_seconds(process: int) -> float:
    """Processor seconds of a process and of its children that live or were waited for."""
    text = Path(f"/proc/{process}/stat").read_text()
    fields = text.rpartition(")")[2].split()
    own = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return own + sum(_tree_seconds(int(child)) for child in children)


def until_events(env: Mapping[str, str]) -> dict[str, tuple[float, float]]:
    """(processor seconds, seconds) of `generate` until its first event, and its first step."""
    found: dict[str, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "everyframe", "generate", PROMPT, "--seed", "1", "--json"]
        command += ["--num-inference-steps", "2", "-o", f"{folder}/a.mp4", "--run-dir", "off"]
        began = time.perf_counter()
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            name = json.loads(line)["type"]
            if name in ("planned", "step") and name not in found:
                found[name] = _tree_seconds(process.pid), time.perf_counter() - began
        if process.wait() != 0:
            raise RuntimeError(f"generate ended with {process.returncode}")
    return found


def environment(source: Path, cache: str) -> dict[str, str]:
    """What a process runs in: that source, that cache folder, one thread."""
    own = {"PYTHONPATH": str(source), "EVERYFRAME_CACHE": cache, "OMP_NUM_THREADS": "1"}
    return {**os.environ, **own, "HF_HUB_OFFLINE": "1"}


def of_source(name: str, source: Path, note: Callable[[str, float], None]) -> None:
    """Measure what one source tree takes; `note` gets each row."""
    plan = [sys.executable, "-m", "everyframe", "plan", PROMPT, "--seed", "1"]
    with tempfile.TemporaryDirectory() as cache:
        env = environment(source, cache)
        note(f"{name}: --help", spent([sys.executable, "-m", "everyframe", "--help"], env))
        note(f"{name}: plan, first", spent(plan, env))
        note(f"{name}: plan, second", spent(plan, env))
    with tempfile.TemporaryDirectory() as cache:
        env = environment(source, cache)
        for which in ("first", "second"):
            for event, (processor, wall) in until_events(env).items():
                what = "first event" if event == "planned" else "first step"
                note(f"{name}: generate to its {what}, {which}", processor)
                note(f"{name}: generate to its {what}, {which} (wall)", wall)


def one_round(sources: Mapping[str, Path]) -> dict[str, float]:
    """Every row once."""
    found: dict[str, float] = {}
    env = environment(SOURCE, tempfile.gettempdir())
    for name, code in (("import torch", "import torch"), (UNIT, UNIT), (FLOOR, NEEDS)):
        found[name] = spent([sys.executable, "-c", code], env)
    for name, source in sources.items():
        of_source(name, source, found.__setitem__)
    return found


def steps_of(source: Path) -> dict[str, float]:
    """Where the time of a plan goes, with an empty cache folder."""
    with tempfile.TemporaryDirectory() as cache:
        code = _TIMED.format(steps=json.dumps(STEPS))
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment(source, cache), check=True,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def ratios(rounds: list[dict[str, float]], row: str, unit: str) -> str:
    """The median over rounds of a row in units of another, with the least and the most."""
    each = sorted(found[row] / found[unit] for found in rounds)
    return f"{statistics.median(each):.2f} ({each[0]:.2f} to {each[-1]:.2f})"


def _processor() -> str:
    text = subprocess.run(["lscpu"], check=True, stdout=subprocess.PIPE, text=True).stdout
    facts = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    flags = [f for f in facts.get("Flags", "").split() if f.startswith(("avx", "amx", "fma"))]
    return f"{facts['Model name'].strip()} ({', '.join(flags)}), {os.cpu_count()} cores"


def page(rounds: list[dict[str, float]], steps: Mapping[str, list[dict[str, float]]]) -> str:
    """The result as Markdown."""
    rows = "\n".join(
        f"| {row} | {statistics.median(found[row] for found in rounds):.2f} s | "
        f"{ratios(rounds, row, UNIT)} | {ratios(rounds, row, FLOOR)} |"
        for row in rounds[0]
    )
    names = list(steps)
    parts = "\n".join(
        f"| {row} | "
        + " | ".join(f"{statistics.median(f[row] for f in steps[n]):.2f} s" for n in names)
        + " |"
        for row in STEPS
    )
    versions = ", ".join(
        f"{n} {metadata.version(n)}" for n in ("torch", "diffusers", "transformers")
    )
    text = f"""
Processor time of the whole process tree, medians of {len(rounds)} rounds; ratios are taken within a
round, least and most in brackets. Rows that end in (wall) are seconds on the clock.

| what | seconds | `{UNIT}` = 1.00 | {FLOOR} = 1.00 |
| --- | --- | --- | --- |
{rows}

Where the time of a plan goes, first run, one thing after the other in one process:

| what | {" | ".join(names)} |
| --- |{" --- |" * len(names)}
{parts}

Hardware: {_processor()}; one thread a process; load at the end {os.getloadavg()[0]:.1f}.
Versions: python {platform.python_version()}, {platform.system()} {platform.machine()}, {versions}.
"""
    return compose_page("What it takes to begin", text)


def main() -> None:
    parser = make_parser(__doc__, rounds=5)
    parser.add_argument("--beside", type=Path, help="the src folder of an older version")
    args = parser.parse_args()
    sources = {"now": SOURCE}
    if args.beside is not None:
        sources = {"before": args.beside.resolve(), **sources}
    rounds = [one_round(sources) for _ in range(args.rounds)]
    steps = {
        name: [steps_of(source) for _ in range(min(3, args.rounds))]
        for name, source in sources.items()
    }
    publish("startup", page(rounds, steps), is_page=args.is_page)


if __name__ == "__main__":
    main()
