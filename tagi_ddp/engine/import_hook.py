"""Prepares ``import pytagi`` in every interpreter of an environment that has tagi_ddp.

Installed a second time, with the loader, as the package ``_tagi_ddp_engine``, which a .pth file
imports at each start of Python: so it must do without tagi_ddp, cost next to nothing, and never
fail.
"""

import sys


class TagiDdpEngineFinder:
    """Loads the libraries that the engine's extension needs when it is first looked up."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):  # type: ignore[no-untyped-def]
        """Find the extension as Python's own finder does, with the libraries in place."""
        if name != "cutagi":
            return None
        try:
            from .loader import answer_without_driver, preload, seed_embeddings
        except ImportError:  # half uninstalled: not ours to report
            return None
        preload()
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):  # type: ignore[no-untyped-def]
                execute(module)
                answer_without_driver(module)
                seed_embeddings(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Put the finder first on ``sys.meta_path``, once, whichever copy of this module asks."""
    name = TagiDdpEngineFinder.__name__
    if all(getattr(finder, "__name__", None) != name for finder in sys.meta_path):
        sys.meta_path.insert(0, TagiDdpEngineFinder)
