"""The verdicts that tagi-ddp doctor draws from its findings."""

from __future__ import annotations

from typing import Any

import pytest

from tagi_ddp.commands.check import Finding
from tagi_ddp.commands.checks import CHECKS, compute_on_gpus
from tagi_ddp.commands.doctor import as_text, readiness


@pytest.mark.parametrize(
    ("what", "value", "status"),
    [
        ("platform.machine", lambda: "aarch64", "broken"),
        ("platform.system", lambda: "Darwin", "broken"),
        ("platform.python_implementation", lambda: "PyPy", "broken"),
        ("sys.version_info", (3, 9, 1), "broken"),
        ("sys.version_info", (3, 12, 1), "ok"),
    ],
)
def test_pythons(monkeypatch: pytest.MonkeyPatch, what: str, value: Any, status: str) -> None:
    monkeypatch.setattr(what, value)
    assert CHECKS["python"].run().status == status


@pytest.mark.parametrize(
    ("devices", "torch", "status", "detail"),
    [
        (0, True, "missing", "there is no device"),
        (2, True, "ok", 'compute="torch": yes'),
        (1, False, "missing", 'compute="torch": no'),
    ],
)
def test_compute_on_gpus(devices: int, torch: bool, status: str, detail: str) -> None:
    found = compute_on_gpus(
        {
            "CUDA": Finding("ok", "", facts={"devices": devices}),
            "torch": Finding("ok", "", facts={"cuda": torch}),
        }
    )
    assert (found.status, found.remedy == "", found.detail) == (status, status == "ok", detail)


@pytest.mark.parametrize(
    ("broken", "ready"),
    [
        ((), [True, True, True, True]),
        (("engine",), [False, False, False, False]),
        (("tagi_ddp",), [False, False, False, False]),
        (("shared memory",), [True, False, True, True]),
        (("MPI", "gloo"), [True, True, False, True]),
        (("NCCL",), [True, True, True, False]),
        (("compute on GPUs",), [True, True, True, False]),
    ],
)
def test_readiness(broken: tuple[str, ...], ready: list[bool]) -> None:
    found = {
        name: Finding("broken" if name in broken else "ok", "")
        for name in [*CHECKS, "compute on GPUs"]
    }
    assert list(readiness(found).values()) == ready


@pytest.mark.parametrize("driver", ["missing", "ok"])
def test_without_a_gpu_there_is_one_line_about_gpus(driver: Any) -> None:
    found = {name: Finding("ok", "there") for name in CHECKS}
    found |= {"CUDA": Finding(driver, "a driver", "install it")}
    found |= {name: Finding("missing", "no", "do") for name in ("NCCL", "compute on GPUs")}
    names = [line.split("  ")[0] for line in as_text(found).splitlines()]
    about = [name for name in names if name in ("CUDA", "NCCL", "compute on GPUs", "GPUs")]
    if driver == "missing":
        assert about == ["GPUs"] * 2  # in the table, and what to do
    else:
        assert about == ["CUDA", "NCCL", "compute on GPUs", "CUDA", "NCCL", "compute on GPUs"]
