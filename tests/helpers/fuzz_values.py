"""Values of fuzz cases: hostile values for parsers, valid values of options, and changed JSON.

Read next: `fuzz_cases.py`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

#: Texts that break parsers, terminals, file names and formats.
TEXTS = (
    "", " ", "\t", "\n", "-", "--", "-1", "0", "1", "00", "1e400", "nan", "inf", "-inf", "1/0",
    "99999999999999999999", "0x10", "1_000", "٣", "½", "true", "null", "[]", "{}", "()", "\\",
    "/", "..", "../..", "/", "/dev/null", "/dev/full", "/proc/self/mem", "~", "~nobody-here/x",
    "$HOME", "a" * 300, "a" * 5000, "é" * 300, "\u202e", "\u200b", "\ufeff", "\udcff", "\x1b[2J",
    "\x1b]0;x\x07", "\x00", "😀" * 100, "a\x00b", "%s%n", "{0}", "<script>", "'; --", "auto",
    "cpu", "cuda:9", "fp32", "64x64", "0x0", "-1x-1", "16384x16384", "99999x1", "1:1", "0:0",
    "16:9", "360p", "8GB", "-8GB", "0.0000001", "1e-400", "NaNGB", "data=0", "cfg=2,cfg=2",
    "sequence=99", "cpu,cpu", ",", "1,", "max_sequence_length=-5", "max_sequence_length=1e99",
    "=", "=1", "x=", "prompt=", "seed=1", "everyframe", "shapes", "opensora-1.2", "a/b", "a/b/c",
    "http://x", "file:///etc/passwd",
)  # fmt: skip
#: Names of outputs that stay in the folder they are written into, if they are written at all.
OUTPUTS = (
    "", " ", "-", ".mp4", "x.MP4", "x.gif", "x.png", "x.mp4/", "x/", "x/y.mp4", "x.jpeg", "x", ".",
    "\n.mp4", "\x1b[2J.mp4", "\udcff.webp", "\u202e4pm.mp4", "😀.gif", "é" * 130 + ".mp4", "%s.mp4",
    "%d.png", "a" * 300 + ".mp4", "-o.mp4", "home", "output.txt", "x.json", "~.mp4", "*.mp4",
)  # fmt: skip
#: Texts that are right for options that take only some.
RIGHT: Mapping[str, tuple[str, ...]] = {
    "size": ("32x32", "64x48", "16x16", "256x256", "33x31", "16384x16384"),
    "resolution": ("144p", "240p", "360p", "720p"),
    "aspect": ("16:9", "9:16", "1:1", "1000:1"),
    "dtype": ("auto", "fp32", "bf16", "fp16"),
    "quantize": ("auto", "none", "int8", "fp8"),
    "device": ("auto", "cpu", "cuda", "mps", "cuda:1"),
    "devices": ("cpu", "cpu,cpu", "cpu,cpu,cpu", "cuda:0,cuda:1"),
    "parallel": ("auto", "data=2", "cfg=2", "sequence=3", "cfg=2,sequence=2", "ring=2"),
    "shares": ("1,1", "24,8", "1,2,3", "0,1"),
    "max_memory": ("8GB", "1MB", "100kB", "1TB"),
    "max_host_memory": ("8GB", "1MB", "100kB", "1TB"),
    "attention": ("flash", "efficient", "cudnn", "math"),
    "disable": ("channels-last", "fused", "a,b"),
    "fit": ("crop", "pad", "stretch", "contain"),
    "variant": ("fp16", "bf16"),
    "option": ("max_sequence_length=16", "output_type=pil", "clean_caption=true"),
}
#: Values in the place of others in JSON.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 2**31, 2**63, -(2**63), 10**30, 0.0, -0.0, 0.5, 1e308,
    -1e308, float("nan"), float("inf"), "", "x", "..", "/etc/passwd", "a" * 5000, "\x1b[2J", [],
    [[]], [1], {}, {"a": {}}, [None], ["os", "system"], ["", "x"], ["this", "x"],
    ["diffusers", "__import__"], ["diffusers.utils", "logging"], "logging", "bfloat16", "../x",
)  # fmt: skip


def changed(value: Any, rng: random.Random) -> Any:
    """That JSON with one or a few places changed."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        value = _changed_once(value, rng)
    return value


def _changed_once(value: Any, rng: random.Random) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value))
        kind = rng.random()
        if kind < 0.1:
            return {name: each for name, each in value.items() if name != key}
        if kind < 0.15:
            return {**value, rng.choice(TEXTS): value[key]}
        return {**value, key: _changed_once(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        return [*value[:at], _changed_once(value[at], rng), *value[at + 1 :]]
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.4:
        return rng.choice((value + 1, value - 1, -value, value * 2, value * 10**6, 0))
    return rng.choice(VALUES)
