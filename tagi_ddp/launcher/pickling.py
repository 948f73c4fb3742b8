"""How functions and their results travel between a launcher and the ranks that it has started."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from types import BuiltinFunctionType, CodeType
from typing import Any


def dumps(value: object) -> bytes:
    """Pickle with what it refers to, and with the names of source files, for tracebacks."""
    import cloudpickle  # imported on use: `import tagi_ddp` is quick

    script = sys.modules.get("__mp_main__")
    # The script has this name in a process that multiprocessing has spawned; no rank can import it.
    if script is not None and script.__name__ == "__mp_main__":
        cloudpickle.register_pickle_by_value(script)
    reduce_code = cloudpickle.Pickler.dispatch_table[CodeType]

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, CodeType):  # since 3.1.3 cloudpickle leaves its file out
                return _of_file, (obj.co_filename, *reduce_code(obj))
            # A function of a pybind11 module, as the engine's manual_seed, goes by its name.
            if isinstance(obj, BuiltinFunctionType) and type(obj.__self__).__name__ == "PyCapsule":
                return getattr, (sys.modules[obj.__module__], obj.__name__)
            return super().reducer_override(obj)

    with io.BytesIO() as file:
        Pickler(file).dump(value)
        return file.getvalue()


def _of_file(file: str, make: Callable[..., CodeType], parts: tuple[Any, ...]) -> CodeType:
    return make(*parts).replace(co_filename=file)
