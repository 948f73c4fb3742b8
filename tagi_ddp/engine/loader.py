"""The loader of the engine, pytagi, for machines with or without the libraries that it links to.

The engine's extension is linked to Open MPI 4 and to NCCL. The dynamic loader uses a library of the
same name that is loaded already. So each library is loaded beforehand: the real one that others
(mpi4py, torch) may load later, if there is one, else a stand-in that only fails when called.
``TAGI_DDP_LIBMPI``, ``TAGI_DDP_LIBMPI_CXX`` and ``TAGI_DDP_LIBNCCL`` override the search; each is
the path of a library or "stub". A library that the process has loaded already is kept.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.machinery
import importlib.util
import os
import platform
import site
import sys
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

from tagi_ddp.environment import setting

LIBMPI = "libmpi.so.40"
LIBMPI_CXX = "libmpi_cxx.so.40"
LIBNCCL = "libnccl.so.2"
STUB = "stub"
_OTHER_MPIS = ("libmpi.so.12", "libmpi_abi.so.1")  # MPICH and its relatives; MPI 5's common ABI

_STUB_FOLDER = os.path.join("tagi_ddp", "engine", "shims")


def preload() -> None:
    """Load the libraries that the engine needs, but keep those that are loaded already.

    Raises ImportError if a library that an environment variable names cannot be loaded, or if a
    stand-in is needed and tagi_ddp was not built.
    """
    libmpi = _load(LIBMPI, _mpi_candidates())
    _load(LIBMPI_CXX, _siblings(LIBMPI_CXX, libmpi))
    _load(LIBNCCL, nccl_candidates())


def loaded_libraries() -> dict[str, str]:
    """Return the libraries that the process has loaded: path by name, "stub" for a stand-in."""
    paths = {name: _path_in_process(name) for name in (LIBMPI, LIBMPI_CXX, LIBNCCL)}
    return {name: STUB if _is_stub(path) else path for name, path in paths.items() if path}


def holds_other_mpi() -> bool:
    """Return whether an MPI other than Open MPI is loaded, which the engine cannot use."""
    return any(_path_in_process(name) for name in _OTHER_MPIS)


def load_engine() -> ModuleType:
    """Import and return pytagi; the ImportError says what is missing and what to do."""
    preload()
    try:
        return importlib.import_module("pytagi")
    except ModuleNotFoundError as error:
        if error.name not in ("pytagi", "cutagi"):
            raise
        raise ImportError(
            f"the engine is not installed (no module named {error.name!r}): pip install "
            "pytagi==0.2.1. Its wheels are for CPython 3.10 to 3.12 on x86-64 Linux, others must "
            "build it from source; this is "
            f"{platform.python_implementation()} {platform.python_version()} on "
            f"{platform.machine()} {platform.system()}.",
            name=error.name,
        ) from error
    except ImportError as error:
        raise ImportError(
            f"the engine cannot be loaded: {error}. Libraries loaded for it: {loaded_libraries()}; "
            "TAGI_DDP_LIBMPI=stub and TAGI_DDP_LIBNCCL=stub replace them by stand-ins.",
            name=error.name,
            path=error.path,
        ) from error


def answer_without_driver(extension: ModuleType) -> None:
    """Make the engine's extension report no CUDA devices, instead of raising, without a driver.

    It asks the CUDA runtime, which fails if the driver is missing or too old.
    """
    for name, answer in (("is_cuda_available", False), ("get_cuda_device_count", 0)):
        if (ask := getattr(extension, name, None)) is not None:
            setattr(extension, name, _asking_driver(ask, answer))
    if (network := getattr(extension, "Sequential", None)) is not None:
        network.to_device = _needing_driver(network.to_device)


def _asking_driver(ask: Callable[[], int], answer: int) -> Callable[[], int]:
    @functools.wraps(ask)
    def asked() -> int:
        return ask() if _driver_sees_devices() else answer

    return asked


def _needing_driver(to_device: Callable[[Any, str], None]) -> Callable[[Any, str], None]:
    """Raise RuntimeError before a move to a missing device; the engine would move a part."""

    @functools.wraps(to_device)
    def checked(network: Any, device: str) -> None:
        if str(device).startswith("cuda") and not _driver_sees_devices():
            raise RuntimeError(
                f"there is no CUDA device to move the network to, {device!r}: it stays on "
                f"{network.device}. Check pytagi.cuda.is_available() first"
            )
        to_device(network, device)

    return checked


def seed_embeddings(extension: ModuleType) -> None:
    """Make Embedding draw its means from the seed of ``manual_seed``, as all other layers do.

    The engine draws them from std::random_device, which is still so before the first seed.
    """
    layer, seed_engine = extension.Embedding, extension.manual_seed
    generator: Any = None  # numpy's generator for the last seed

    @functools.wraps(seed_engine)
    def manual_seed(seed: int) -> None:
        nonlocal generator
        seed_engine(seed)
        import numpy as np  # It is slow, and each start of Python imports this module.

        generator = np.random.default_rng(seed % 2**32)

    def redrawing(draw: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(draw)
        def drawn(self: Any, *args: Any, **kwargs: Any) -> None:
            draw(self, *args, **kwargs)
            if generator is not None:
                deviations = generator.standard_normal(len(self.var_w), "float32")
                deviations *= [value**0.5 for value in self.var_w]
                self.mu_w = deviations.tolist()

        return drawn

    manual_seed.__qualname__ = "manual_seed"  # Pickle uses this name.
    extension.manual_seed = manual_seed  # type: ignore[attr-defined]
    layer.__init__ = redrawing(layer.__init__)
    layer.init_weight_bias = redrawing(layer.init_weight_bias)


def _driver_sees_devices() -> bool:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return not failed and count.value > 0


def _load(soname: str, candidates: Iterable[str]) -> str:
    """Load ``soname`` into the process and return its path.

    ctypes uses RTLD_LOCAL: only objects linked to the library, or stand-in, see its symbols.
    """
    path = _path_in_process(soname)
    if path is not None:
        return path
    name = soname.partition(".")[0].upper()
    chosen, variable = setting(name), f"TAGI_DDP_{name}"
    if chosen not in ("", STUB):
        try:
            ctypes.CDLL(chosen)
        except OSError as error:
            raise ImportError(f"{variable}={chosen} cannot be loaded: {error}") from error
        path = _path_in_process(soname)
        if path is None:
            raise ImportError(f"{variable}={chosen} is not {soname}, which the engine needs")
        return path
    if not chosen:
        path = _first(soname, candidates)
        if path is not None:
            return path
    path = _stub(soname)
    if path is None:
        raise ImportError(
            f"no {soname} was found, and tagi_ddp's stand-in for it is missing: build the package "
            "with pip install, or pip install -e"
        )
    ctypes.CDLL(path)
    return path


def _first(soname: str, candidates: Iterable[str]) -> str | None:
    """Load the first candidate that can be loaded; return its path if it is ``soname``."""
    for candidate in candidates:
        try:
            ctypes.CDLL(candidate)
        except OSError:
            continue
        return _path_in_process(soname)
    return None


class _LinkMap(ctypes.Structure):
    """The beginning of the dynamic loader's ``struct link_map``."""

    _fields_ = (("address", ctypes.c_void_p), ("name", ctypes.c_char_p))


def _path_in_process(soname: str) -> str | None:
    """Return the path of the library called ``soname`` if the process has loaded one."""
    try:
        library = ctypes.CDLL(soname, os.RTLD_NOLOAD)
    except OSError:
        return None
    entry = ctypes.POINTER(_LinkMap)()
    rtld_di_linkmap = 2
    ctypes.CDLL(None).dlinfo(ctypes.c_void_p(library._handle), rtld_di_linkmap, ctypes.byref(entry))
    return os.fsdecode(entry.contents.name)


def _stub(soname: str) -> str | None:
    """Return the path of the stand-in, or None.

    It is in site-packages even if the package itself is imported from its source folder.
    """
    for entry in sys.path:
        path = os.path.abspath(os.path.join(entry, _STUB_FOLDER, soname))
        if os.path.isfile(path):
            return path
    return None


def _is_stub(path: str) -> bool:
    return os.path.dirname(path).endswith(_STUB_FOLDER)


def _mpi_candidates() -> Iterator[str]:
    """Yield the libraries of which mpi4py uses the first that loads.

    If that is not Open MPI, Open MPI will not be loaded at all: later candidates are useless.
    """
    spec = importlib.util.find_spec("mpi4py")
    for folder in (spec and spec.submodule_search_locations) or ():
        for suffix in importlib.machinery.EXTENSION_SUFFIXES:
            extension = os.path.join(folder, "MPI" + suffix)
            if os.path.isfile(extension):  # It is linked to the only MPI it can use.
                yield extension
                return
    chosen = os.environ.get("MPI4PY_LIBMPI")
    entries = _lib_folders() if chosen is None else chosen.split(os.pathsep)
    for entry in entries:
        entry = os.path.expanduser(os.path.expandvars(entry))
        if entry and not os.path.isdir(entry):
            yield entry
            continue
        for name in ("libmpi.so", "libmpi.so.12", LIBMPI):
            yield os.path.join(entry, name)


def nccl_candidates() -> Iterator[str]:
    """Yield the libraries that torch may load later, in torch's order, then all others."""
    for folder in ("nvidia/nccl/lib", "nvidia/cu13/lib", "torch/lib"):
        for entry in sys.path:
            yield os.path.join(entry, folder, LIBNCCL)
    for folder in _lib_folders():
        yield os.path.join(folder, LIBNCCL)


def _siblings(soname: str, path: str) -> Iterator[str]:
    """Yield possible paths of ``soname`` in the installation of the library at ``path``."""
    for library in (path, os.path.realpath(path)):
        yield os.path.join(os.path.dirname(library), soname)


def _lib_folders() -> list[str]:
    """Return the library folders of Python's prefixes, then "" for the dynamic loader's search."""
    prefixes = []
    if sys.exec_prefix != sys.base_exec_prefix:
        prefixes.append(sys.exec_prefix)
    if site.ENABLE_USER_SITE:
        prefixes.append(os.path.abspath(site.getuserbase()))
    if sys.base_exec_prefix in site.PREFIXES:
        prefixes.append(sys.base_exec_prefix)
    return [os.path.join(prefix, "lib") for prefix in prefixes if prefix != "/usr"] + [""]
