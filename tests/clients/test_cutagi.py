"""A script written for pytagi's own DDP trains here: the engine's public examples/ddp_mnist.py.

It is read from a checkout of github.com/lhnguyen102/cuTAGI that TAGI_DDP_CUTAGI_SOURCE names. In a
temporary copy these change, and nothing else: the import of DDPConfig and DDPSequential, the
backend, the updater's device, the check for CUDA; and the numbers of images, to take less time.
"""

import hashlib
import os
import re
import runpy
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from support.clients import IMAGES, run_under_mpirun, write_mnist_files

import tagi_ddp

SOURCE = os.environ.get("TAGI_DDP_CUTAGI_SOURCE")
NEEDED = """
    if not pytagi.cuda.is_available():
        raise ValueError("CUDA is not available")
"""
CHANGES = {
    "    DDPConfig,\n    DDPSequential,\n": "",
    "from pytagi import HRCSoftmaxMetric\n": (
        "from pytagi import HRCSoftmaxMetric\nfrom tagi_ddp import DDPConfig, DDPSequential\n"
    ),
    'backend="nccl"': 'backend="{backend}"',
    '"cuda:" + str(device_ids[rank])': '"cpu"',
    NEEDED: "",
    "num_images=60000": f"num_images={IMAGES['train']}",
    "num_images=10000": f"num_images={IMAGES['t10k']}",
}


@pytest.fixture
def folder(tmp_path):
    """A folder with images where the script looks for MNIST's."""
    write_mnist_files(tmp_path / "data" / "mnist")
    return tmp_path


def copy_example(source, folder, backend):
    package = folder / "examples"
    package.mkdir()
    for name in ("__init__.py", "data_loader.py"):
        shutil.copy(source / "examples" / name, package)
    text = (source / "examples" / "ddp_mnist.py").read_text()
    for old, new in CHANGES.items():
        assert text.count(old) == 1, f"the public example is another one: no single {old!r}"
        text = text.replace(old, new.replace("{backend}", backend))
    (package / "ddp_mnist.py").write_text(text)


@pytest.mark.skipif(not SOURCE, reason="TAGI_DDP_CUTAGI_SOURCE names no checkout of cuTAGI")
@pytest.mark.parametrize("backend", ["mpi", "shm"])
def test_the_public_ddp_example_trains_on_two_cpu_ranks(folder, backend):
    for module in ("fire", "pandas"):
        pytest.importorskip(module)
    copy_example(Path(SOURCE), folder, backend)
    done = run_under_mpirun(__file__, "--num_epochs", "1", "--batch_size", "32", cwd=folder)
    assert "Training complete." in done.stdout
    error = float(re.findall(r"test error: ([\d.]+)%", done.stderr)[-1])
    assert error < 60, "ten classes, so that guessing has 90 %"
    hashes = re.findall(r"parameters of rank (\d): (\w+)", done.stdout)
    assert sorted(rank for rank, _ in hashes) == ["0", "1"]
    assert len({value for _, value in hashes}) == 1


def main():
    """Run the copy as mpirun's process, then print a hash of the parameters."""
    models = []
    initialise = tagi_ddp.DDPSequential.__init__

    def recording(self, *args, **kwargs):
        initialise(self, *args, **kwargs)
        models.append(self)

    tagi_ddp.DDPSequential.__init__ = recording
    sys.path[0] = ""  # as with python -m examples.ddp_mnist
    runpy.run_module("examples.ddp_mnist", run_name="__main__", alter_sys=True)
    (model,) = models
    value = hashlib.sha256()
    for layer in model.state_dict().values():
        for parameters in layer:
            value.update(np.asarray(parameters, np.float32).tobytes())
    print(f"parameters of rank {model.config.rank}: {value.hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
