"""Pickling of functions and of their results, for a launcher and its ranks."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from types import BuiltinFunctionType, CodeType
from typing import Any


def dumps(value: object) -> bytes:
    """Pickle a value with all that it refers to, and with source file names for tracebacks."""
    import cloudpickle  # Imported on use: `import tagi_ddp` is quick.

    script = sys.modules.get("__mp_main__")
    # The script has this name in a process that multiprocessing has spawned; no rank can import it.
    if script is not None and script.__name__ == "__mp_main__":
        cloudpickle.register_pickle_by_value(script)
    reduce_code = cloudpickle.Pickler.dispatch_table[CodeType]

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, CodeType):  # cloudpickle drops the file since 3.1.3.
                return _of_file, (obj.co_filename, *reduce_code(obj))
            # Pickle a function of a pybind11 module, like the engine's manual_seed, by its name.
            if isinstance(obj, BuiltinFunctionType) and type(obj.__self__).__name__ == "PyCapsule":
                return getattr, (sys.modules[obj.__module__], obj.__name__)
            return super().reducer_override(obj)

    with io.BytesIO() as file:
        Pickler(file).dump(value)
        return file.getvalue()


def _of_file(file: str, make: Callable[..., CodeType], parts: tuple[Any, ...]) -> CodeType:
    return make(*parts).replace(co_filename=file)
