"""Everyframe's nodes for ComfyUI; `nodes.py` has them."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io


class EveryframeExtension(ComfyExtension):
    """The extension that ComfyUI loads."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """The nodes of the pack."""
        from .nodes import NODES

        return list(NODES)


async def comfy_entrypoint() -> ComfyExtension:
    """Give ComfyUI the extension."""
    return EveryframeExtension()
