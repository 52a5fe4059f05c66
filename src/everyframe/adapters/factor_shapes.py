"""Tensors of each kind of weight change in a LoRA file, and their valid shapes.

Kinds: ``lora`` (two factors; of convolutions also three), ``loha`` and ``lokr`` (LyCORIS,
https://arxiv.org/abs/2309.14859), ``diff`` (the difference itself) and ``set`` (the new weight).
`weight_changes` computes them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from everyframe.adapters.weight_sites import Shape

#: Kind -> alternatives of the roles that it needs, and those that it may have besides.
KINDS: Mapping[str, tuple[tuple[frozenset[str], ...], frozenset[str]]] = {
    "lora": ((frozenset({"down", "up"}),), frozenset({"mid"})),
    "loha": (
        (frozenset({"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"}),),
        frozenset({"hada_t1", "hada_t2"}),
    ),
    "lokr": (
        tuple(
            frozenset({*first, *second})
            for first in (("lokr_w1",), ("lokr_w1_a", "lokr_w1_b"))
            for second in (("lokr_w2",), ("lokr_w2_a", "lokr_w2_b"))
        ),
        frozenset({"lokr_t2"}),
    ),
    "diff": ((frozenset({"diff"}),), frozenset()),
    "diff_m": ((frozenset({"diff_m"}),), frozenset()),
    "set": ((frozenset({"set_weight"}),), frozenset()),
}
#: Roles that go with a kind or, for the bias, stand alone.
BESIDE = frozenset({"alpha", "dora", "diff_b", "up_bias"})

#: Kinds that are added or set as they are.
_UNSCALED = ("diff", "diff_m", "set")


def kind_of(roles: Collection[str]) -> tuple[str, str]:
    """Kind of the change and problem, by the roles of a module's tensors; one of them is empty.

    Both are empty if the file changes the module's bias only.
    """
    main = {role for role in roles if role not in BESIDE}
    kinds = [
        kind
        for kind, (needed, more) in KINDS.items()
        if main & {*more, *frozenset().union(*needed)}
    ]
    if len(kinds) > 1:
        return "", f"has changes of {len(kinds)} kinds, {' and '.join(kinds)}"
    if not kinds:
        lone = sorted({"alpha", "dora", "up_bias"} & {*roles})
        return "", f"has {lone[0]} without factors" if lone else ""
    needed, more = KINDS[kinds[0]]
    if any(each <= main <= each | more for each in needed):
        if ("hada_t1" in main) != ("hada_t2" in main):
            return "", "has one of hada_t1 and hada_t2"
        if "lokr_t2" in main and "lokr_w2_a" not in main:
            return "", "has lokr_t2 without lokr_w2_a"
        if kinds[0] in _UNSCALED and "alpha" in roles:
            return "", "has alpha beside a difference, which has no rank to divide it by"
        if kinds[0] == "set" and "dora" in roles:
            return "", "has a DoRA magnitude beside a new weight"
        return kinds[0], ""
    lacking = min((each - main for each in needed), key=len)
    return "", f"has {', '.join(sorted(main))} and lacks {', '.join(sorted(lacking)) or 'nothing'}"


def rank_of(kind: str, shapes: Mapping[str, Shape]) -> int | None:
    """Rank by which alpha is divided; None for a kind without alpha."""
    roles = {"lora": ("down",), "loha": ("hada_w1_b",), "lokr": ("lokr_w2_b", "lokr_w1_b")}
    found = [shapes[role] for role in roles.get(kind, ()) if role in shapes]
    return found[0][0] if found and found[0] else None


def shape_problem(kind: str, shapes: Mapping[str, Shape], wanted: Shape) -> str:
    """Why these tensors can't change a weight of that shape; empty if they can."""
    empty = [f"{name} {shape}" for name, shape in shapes.items() if 0 in shape]
    if empty:
        return f"has tensors without numbers: {', '.join(empty)}"
    found = _SHAPES[kind](shapes, wanted) if kind else ""
    if found:
        return found
    dora = shapes.get("dora")
    if dora is not None and dora_axis(dora, wanted) is None:
        return f"has a DoRA magnitude {dora}, the weight is {wanted}"
    return ""


def dora_axis(shape: Shape, wanted: Shape) -> int | None:
    """Weight axis of a DoRA magnitude: 0 for output channels, 1 for input channels, else None."""
    if shape == (wanted[0],) or (len(shape) > 1 and shape[0] == wanted[0] == math.prod(shape)):
        return 0
    if len(shape) > 1 and len(wanted) > 1 and shape[1] == wanted[1] == math.prod(shape):
        return 1
    return None


def _of_lora(shapes: Mapping[str, Shape], wanted: Shape) -> str:
    down, up, mid = shapes["down"], shapes["up"], shapes.get("mid")
    if len(wanted) < 2:
        return f"has factors, the weight is a vector {wanted}"
    if min(len(down), len(up)) < 2 or math.prod(up[1:]) != down[0]:
        return f"has factors of two ranks, {up} and {down}"
    if mid is not None and mid[:2] != (down[0], down[0]):
        return f"has a middle factor {mid} between {up} and {down}"
    inner = wanted[1:] if mid is None else (wanted[1],)
    made = (up[0], math.prod(down[1:]))
    is_same = made == (wanted[0], math.prod(inner)) and (mid is None or mid[2:] == wanted[2:])
    if len(down) > 2 and len(wanted) > 2 and mid is None:
        is_same = is_same and down[1:] == wanted[1:]
    return "" if is_same else f"has factors {up} and {down}, the weight is {wanted}"


def _of_loha(shapes: Mapping[str, Shape], wanted: Shape) -> str:
    names = tuple(f"hada_w{number}_{side}" for number in (1, 2) for side in "ab")
    given = [shapes[name] for name in names]
    shown = ", ".join(map(str, given))
    if len(wanted) < 2 or any(len(each) != 2 for each in given):
        return f"has LoHa factors {shown}, the weight is {wanted}"
    if "hada_t1" not in shapes:
        made = [(a[0], b[1]) for a, b in (given[:2], given[2:]) if a[1] == b[0]]
        is_same = made == [(wanted[0], math.prod(wanted[1:]))] * 2
    else:
        cores = [shapes["hada_t1"], shapes["hada_t2"]]
        is_same = all(
            a[1] == wanted[0] and b[1] == wanted[1] and core == (a[0], b[0], *wanted[2:])
            for a, b, core in zip(given[::2], given[1::2], cores, strict=True)
        )
    return "" if is_same else f"has LoHa factors {shown}, the weight is {wanted}"


def _of_lokr(shapes: Mapping[str, Shape], wanted: Shape) -> str:
    shown = ", ".join(f"{role.removeprefix('lokr_')} {shapes[role]}" for role in sorted(shapes)
                      if role.startswith("lokr"))  # fmt: skip
    problem = f"has LoKr factors {shown}, the weight is {wanted}"
    if len(wanted) < 2:
        return problem
    first = _lokr_part(shapes, "lokr_w1")
    second = _lokr_part(shapes, "lokr_w2")
    if first is None or second is None or len(first) != 2 or len(second) not in (2, len(wanted)):
        return problem
    made = (first[0] * second[0], first[1] * second[1], *second[2:])
    is_same = made == wanted or (len(made) == 2 and made == (wanted[0], math.prod(wanted[1:])))
    return "" if is_same else problem


def _lokr_part(shapes: Mapping[str, Shape], name: str) -> Shape | None:
    if name in shapes:
        return shapes[name]
    a, b, core = shapes[f"{name}_a"], shapes[f"{name}_b"], shapes.get("lokr_t2")
    if core is not None and name == "lokr_w2":
        if len(core) < 3 or len(a) != 2 or len(b) != 2 or core[:2] != (a[0], b[0]):
            return None
        return (a[1], b[1], *core[2:])
    if len(a) != 2 or len(b) < 2 or a[1] != b[0]:
        return None
    return (a[0], *b[1:])


def _of_difference(shapes: Mapping[str, Shape], wanted: Shape) -> str:
    (shape,) = (shapes[role] for role in ("diff", "diff_m", "set_weight") if role in shapes)
    return "" if shape == wanted else f"has a difference {shape}, the weight is {wanted}"


_SHAPES = {
    "lora": _of_lora,
    "loha": _of_loha,
    "lokr": _of_lokr,
    "diff": _of_difference,
    "diff_m": _of_difference,
    "set": _of_difference,
}
