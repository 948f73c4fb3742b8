"""NCCL's own library where it is installed, on machines without a GPU: it answers, and it fails."""

from __future__ import annotations

import pytest

from tagi_ddp import CommunicatorError, launch
from tagi_ddp.communicators.nccl.libraries import NcclMissing, open_cuda, open_nccl


@pytest.fixture(scope="module")
def library() -> str:
    """The path of NCCL's library."""
    try:
        return open_nccl().path
    except NcclMissing as error:
        pytest.skip(str(error))


def test_it_answers(library: str) -> None:
    nccl = open_nccl()
    assert nccl.version >= 21800
    ids = [nccl.unique_id() for _ in range(2)]
    assert len(ids[0]) == len(ids[1]) == 128
    assert ids[0] != ids[1]


def test_every_rank_gets_its_text(
    library: str, stand_in: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for CUDA's driver, of which NCCL knows nothing."""
    try:
        open_cuda()
    except CommunicatorError:
        pass
    else:
        pytest.skip("there is a driver, on which NCCL works")
    monkeypatch.setenv("TAGI_DDP_LIBNCCL", library)
    monkeypatch.setenv("TAGI_DDP_LIBCUDA", stand_in["TAGI_DDP_LIBCUDA"])

    def connect() -> str:
        import tagi_ddp

        with pytest.raises(tagi_ddp.CommunicatorError) as error:
            tagi_ddp.init("nccl", timeout=30)
        return str(error.value)

    for text in launch(connect, 2, timeout=60):
        assert "ncclCommInitRankConfig: unhandled cuda error" in text
        assert "driver version is insufficient" in text
