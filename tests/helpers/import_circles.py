"""Import cycles between modules and between folders, which rules of one module can't see."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from helpers.architecture_rules import Module


def import_circles(modules: Sequence[Module]) -> list[list[str]]:
    """Groups of modules that import each other, also within functions and for types alone."""
    names = {module.name.removesuffix(".__init__") for module in modules}
    graph = {
        module.name.removesuffix(".__init__"): _imported_modules(module, names)
        for module in modules
    }
    return _circles(graph)


def folder_circles(modules: Sequence[Module]) -> list[list[str]]:
    """The same of a package's folders, each as one; modules beside them stand for themselves."""
    names = {module.name.removesuffix(".__init__") for module in modules}
    graph: dict[str, set[str]] = {}
    for module in modules:
        own = _place(module.name)
        targets = {_place(name) for name in _imported_modules(module, names)}
        graph.setdefault(own, set()).update(targets - {own})
        for target in targets:
            graph.setdefault(target, set())
    return _circles(graph)


def _place(name: str) -> str:
    """``everyframe.server.queue`` of ``everyframe.server.queue.store``."""
    return ".".join(name.removesuffix(".__init__").split(".")[:3])


def _circles(graph: dict[str, set[str]]) -> list[list[str]]:
    return [sorted(group) for group in _strong_components(graph) if len(group) > 1]


def _imported_modules(module: Module, names: set[str]) -> set[str]:
    own = module.name.removesuffix(".__init__")
    found = set()
    for _, name in module.imports:
        target = name if name in names else name.rpartition(".")[0]
        # A package's __init__ may import its own modules.
        if target in names and target != own and not target.startswith(f"{own}."):
            found.add(target)
    return found


def _strong_components(graph: dict[str, set[str]]) -> Iterator[set[str]]:
    """Tarjan's algorithm (1972), with a stack of its own in place of recursion."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    for root in graph:
        work = [(root, iter(sorted(graph[root])))] if root not in order else []
        while work:
            node, rest = work[-1]
            if node not in order:
                order[node] = low[node] = len(order)
                stack.append(node)
            for other in rest:
                if other not in order:
                    work.append((other, iter(sorted(graph[other]))))
                    break
                if other in stack:
                    low[node] = min(low[node], order[other])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == order[node]:
                    group = set(stack[stack.index(node) :])
                    del stack[stack.index(node) :]
                    yield group
