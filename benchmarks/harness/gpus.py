"""Shared parts of rows of GPUs: why there is no GPU, ranks on GPUs, and the time of queued work."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.harness.measure import Contender, Figure, measure
from tagi_ddp import BackendUnavailable, Communicator, init
from tagi_ddp.communicators import all_gather_object
from tagi_ddp.communicators.nccl.libraries import find_device, open_cuda, open_nccl

Ways = dict[str, Callable[[], object]]

STAND_IN = "stand-in"  # the name of a device of the tests' libraries, whose memory is the host's
_FIRST_NCCL_THAT_SHARES = 23000  # as NCCL numbers its versions
_MPS, _MPS_FOLDER = "nvidia-cuda-mps-control", "CUDA_MPS_PIPE_DIRECTORY"
_MPS_LIMIT = 10.0  # seconds for it to begin, and to end


@dataclass(frozen=True)
class OnGpus:
    """A group over NCCL, the device of this rank's tensors, and what a row says of them."""

    nccl: Communicator
    device: torch.device
    where: str


def why_no_gpu() -> str:
    """Return why there is no GPU, or ""."""
    try:
        name = find_device(0).name
    except BackendUnavailable as error:
        return str(error) if torch.cuda.is_available() else "torch finds no GPU"
    return "" if name == STAND_IN or torch.cuda.is_available() else "torch finds no GPU"


def find_gpu() -> tuple[torch.device, str]:
    """Return the first device and its name."""
    name = find_device(0).name
    return torch.device("cpu:0" if name == STAND_IN else "cuda:0"), name


def why_no_ranks(communicator: Communicator) -> str:
    """Return, on all ranks alike, why they cannot be ranks on this machine's GPUs, or ""."""
    reasons = all_gather_object(communicator, _why_not(communicator.size))
    return next(filter(None, reasons), "")


def _why_not(ranks: int) -> str:
    if reason := why_no_gpu():
        return reason
    try:
        devices, version = open_cuda().device_count, open_nccl().version
    except BackendUnavailable as error:
        return str(error)
    if devices < ranks and version < _FIRST_NCCL_THAT_SHARES:
        return "ranks can share a GPU with NCCL 2.30 or newer only"
    return ""


@contextlib.contextmanager
def at_once_on_a_gpu() -> Iterator[None]:
    """Start NVIDIA's MPS, where it is installed, so that new processes use a GPU at the same time.

    Without it they take turns of some milliseconds, which then is what an exchange takes. One that
    runs already, and the variable of its folder, are left alone.
    """
    if _MPS_FOLDER in os.environ or shutil.which(_MPS) is None:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="tagi_ddp_mps.") as folder:
        variables = {_MPS_FOLDER: folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        environment = os.environ | variables
        daemon = subprocess.Popen([_MPS, "-f"], env=environment, stdin=subprocess.DEVNULL)
        try:
            control, end = Path(folder) / "control", time.monotonic() + _MPS_LIMIT
            while not control.exists() and daemon.poll() is None and time.monotonic() < end:
                time.sleep(0.05)
            if control.exists():  # else the rows say nothing of MPS
                os.environ.update(variables)
            yield
        finally:
            for name in variables:
                os.environ.pop(name, None)
            if daemon.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    # Its server ends, too.
                    subprocess.run([_MPS], input=b"quit\n", env=environment, timeout=_MPS_LIMIT)
                    daemon.wait(_MPS_LIMIT)
            daemon.kill()
            daemon.wait()


@contextlib.contextmanager
def ranks_on_gpus(communicator: Communicator) -> Iterator[OnGpus]:
    """Give the ranks a group over NCCL: with a GPU each or, if those are too few, on one."""
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    devices = min(communicator.size, open_cuda().device_count)
    shared = "cuda:0" if devices == 1 else None
    with init("nccl", communicator.rank, communicator.size, device=shared) as nccl:
        name = find_device(int(nccl.device.removeprefix("cuda:"))).name
        device = torch.device("cpu:0" if name == STAND_IN else nccl.device)
        by_mps = " by MPS" if _MPS_FOLDER in os.environ else ""
        yield OnGpus(nccl, device, f"{ranks_of(nccl)} on {devices} x {name}{by_mps}")


def ranks_of(communicator: Communicator) -> str:
    """Return how many they are, for the name of a row."""
    return f"{communicator.size} rank{'s' * (communicator.size > 1)}"


def measure_queued(
    communicator: Communicator,
    ways: Ways,
    device: torch.device,
    calls: int,
    rounds: int,
    alone: bool = False,
) -> dict[str, Figure]:
    """Return the seconds that each way takes once, of ``calls`` in a row, to the device's end."""

    def several(run: Callable[[], object]) -> Callable[[], None]:
        def runs() -> None:
            for _ in range(calls):
                run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        return runs

    contenders = [Contender(name, several(run), alone=alone) for name, run in ways.items()]
    figures = measure(communicator, contenders, rounds)
    return {name: figure.in_unit(1 / calls) for name, figure in figures.items()}
