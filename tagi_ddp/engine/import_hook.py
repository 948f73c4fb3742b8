"""Prepares ``import pytagi`` in every interpreter of an environment that has tagi_ddp.

Installed a second time, as ``_tagi_ddp_import_hook`` beside the package, where a .pth file imports
it at each start of Python: so it must stand alone, cost next to nothing, and never fail.
"""

import sys


class TagiDdpEngineFinder:
    """Loads the libraries that the engine's extension needs when it is first looked up."""

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> None:
        """Find nothing: leave the search to Python's own finders, with the libraries in place."""
        if name == "cutagi":
            try:
                from tagi_ddp.engine.loader import preload
            except ImportError:  # tagi_ddp is gone, or half uninstalled: not ours to report
                return
            preload()


def install() -> None:
    """Put the finder first on ``sys.meta_path``, once, whichever copy of this module asks."""
    name = TagiDdpEngineFinder.__name__
    if all(getattr(finder, "__name__", None) != name for finder in sys.meta_path):
        sys.meta_path.insert(0, TagiDdpEngineFinder)
