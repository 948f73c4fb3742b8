"""A hook that makes ``import pytagi`` work in every interpreter with tagi_ddp installed.

This module and the loader are installed a second time as the package ``_tagi_ddp_engine``, which a
.pth file imports at each start of Python. So it must not need tagi_ddp, must cost next to nothing,
and must never fail.
"""

import sys


class TagiDdpEngineFinder:
    """A finder that loads the libraries of the engine's extension at its first import."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):  # type: ignore[no-untyped-def]
        """Load the libraries, then find the extension as Python's own finder does."""
        if name != "cutagi":
            return None
        try:
            from .loader import answer_without_driver, preload, seed_embeddings
        except ImportError:  # The package is half uninstalled, which is no error here.
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
    """Put the finder first on ``sys.meta_path``, once for all copies of this module."""
    name = TagiDdpEngineFinder.__name__
    if all(getattr(finder, "__name__", None) != name for finder in sys.meta_path):
        sys.meta_path.insert(0, TagiDdpEngineFinder)
