"""Prepares ``import pytagi`` in every interpreter of an environment that has tagi_ddp.

Installed a second time, with the loader, as the folder ``_tagi_ddp_engine``, from where a .pth file
imports it at each start of Python: so it must do without tagi_ddp, cost next to nothing, and never
fail.
"""

import sys


class TagiDdpEngineFinder:
    """Loads the libraries that the engine's extension needs when it is first looked up."""

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> None:
        """Find nothing: leave the search to Python's own finders, with the libraries in place."""
        if name == "cutagi":
            try:
                from .loader import preload
            except ImportError:  # half uninstalled: not ours to report
                return
            preload()


def install() -> None:
    """Put the finder first on ``sys.meta_path``, once, whichever copy of this module asks."""
    name = TagiDdpEngineFinder.__name__
    if all(getattr(finder, "__name__", None) != name for finder in sys.meta_path):
        sys.meta_path.insert(0, TagiDdpEngineFinder)
