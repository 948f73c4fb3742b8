"""torch.distributed on the backend "tagi_ddp" does what it does on gloo."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.rank_pool import Died, RankPool, doomed_pool
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8)
OPS = (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX)


def run_on_gloo_and_ours(
    comm: Any, path: str, carrier: str, task: Callable[..., Any], *args: Any
) -> Any:
    """Call ``task`` with a group on gloo, then with one on the backend; return both results."""
    import tagi_ddp.parallel  # noqa: F401  (registers)

    os.environ["TAGI_DDP_TORCH_CARRIER"] = carrier
    results = []
    for backend in ("gloo", "tagi_ddp"):
        dist.init_process_group(
            backend, f"file://{path}.{backend}", rank=comm.rank, world_size=comm.size
        )
        try:
            torch.manual_seed(comm.rank)
            results.append(task(*args))
        finally:
            dist.destroy_process_group()
    return results


def same(ours: Any, expected: Any) -> None:
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


# --- collectives -----------------------------------------------------------------------------


def numbers(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randint(0, 9, shape).to(dtype)


def collectives() -> list[Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    found: list[Any] = []

    def keep(*tensors: Tensor) -> None:
        found.extend(tensor.clone() for tensor in tensors)

    for dtype in DTYPES:
        for op in OPS:
            tensor = numbers(dtype, 3, 5)
            dist.all_reduce(tensor, op)
            keep(tensor)
        tensor = numbers(dtype, 7)
        dist.broadcast(tensor, size - 1)
        keep(tensor)
        outputs = [torch.empty(2, 3, dtype=dtype) for _ in range(size)]
        dist.all_gather(outputs, numbers(dtype, 2, 3))
        keep(*outputs)
        output = torch.empty(2 * size, 3, dtype=dtype)
        dist.all_gather_into_tensor(output, numbers(dtype, 2, 3))
        keep(output)
        part = torch.empty(4, dtype=dtype)
        dist.reduce_scatter_tensor(part, numbers(dtype, 4 * size))
        keep(part)
        dist.reduce_scatter(part, list(numbers(dtype, size, 4)))
        keep(part)
        output = torch.empty(2 * size, 3, dtype=dtype)
        dist.all_to_all_single(output, numbers(dtype, 2 * size, 3))
        keep(output)
        sent = [(rank + other) % 3 for other in range(size)]  # rows; what the other expects, too
        output = torch.empty(sum(sent), 3, dtype=dtype)
        dist.all_to_all_single(output, numbers(dtype, sum(sent), 3), sent, sent)
        keep(output)
        tensor = numbers(dtype, 5)
        dist.reduce(tensor, size - 1)
        if rank == size - 1:  # the others' is undefined
            keep(tensor)
        outputs = [torch.empty(5, dtype=dtype) for _ in range(size)]
        dist.gather(numbers(dtype, 5), outputs if rank == 0 else None)
        if rank == 0:
            keep(*outputs)
        dist.scatter(part, list(numbers(dtype, size, 4)) if rank == size - 1 else None, size - 1)
        keep(part)
    return found


def on_view(call: Callable[[Tensor], Any], view: Tensor) -> None:
    """Call it; for gloo, which takes a view's memory for a whole tensor, with a copy."""
    tensor = view.contiguous() if dist.get_backend() == "gloo" else view
    call(tensor)
    view.copy_(tensor.clone())


def unusual() -> list[Any]:
    """Views, bools, complex numbers, objects, messages, many at once, and groups of some."""
    rank, size = dist.get_rank(), dist.get_world_size()
    matrix = numbers(torch.float32, 4, 6)
    on_view(dist.all_reduce, matrix.T[1:3])
    flags = numbers(torch.uint8, 6) > 4
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    on_view(lambda tensor: dist.broadcast(tensor, 1), flags[::2])
    complexes = torch.complex(*numbers(torch.float32, 2, 5))
    dist.all_reduce(complexes)
    whole = numbers(torch.float32, 3 * size)
    dist.all_gather_into_tensor(whole, whole[3 * rank : 3 * rank + 3])  # in place
    work = dist.all_reduce(many := numbers(torch.float64, 10000), async_op=True)
    assert work is not None
    work.get_future().wait()
    polled = [torch.zeros(2) for _ in range(size)]
    work = dist.all_gather(polled, numbers(torch.float32, 2), async_op=True)
    assert work is not None
    while not work.is_completed():
        time.sleep(0.001)
    polled = [tensor.clone() for tensor in polled]  # what is there now
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    got = torch.empty(300_000)  # more than lies on the way
    to, of = (rank + 1) % size, (rank - 1) % size
    sent = numbers(torch.float32, len(got))
    pairs = [dist.P2POp(dist.isend, sent, to), dist.P2POp(dist.irecv, got, of)]
    for work in dist.batch_isend_irecv(pairs):
        work.wait()
    group = dist.new_group([0, size - 1])
    some = numbers(torch.float32, 3)
    if rank in (0, size - 1):
        dist.all_reduce(some, group=group)
        dist.destroy_process_group(group)
    whole_numbers = torch.tensor([3 + rank, -3 - rank])
    if dist.get_backend() == "gloo":  # which does not average
        dist.all_reduce(whole_numbers)
        whole_numbers.div_(size, rounding_mode="trunc")
    else:
        dist.all_reduce(whole_numbers, dist.ReduceOp.AVG)
    dist.barrier()
    return [matrix, flags, complexes, whole, many, *polled, objects, got, some, whole_numbers]


def sparse() -> list[Any]:
    """Sums of sparse tensors of different rows, and what DistributedDataParallel makes of them."""
    rank = dist.get_rank()
    found: list[Any] = []
    for dtype in (torch.float64, torch.float32, torch.cfloat, torch.int64):
        rows = torch.tensor([[rank, 1, 3, 3][: 2 + rank]])
        values = numbers(torch.float32, rows.shape[1], 2).to(dtype)
        tensor = torch.sparse_coo_tensor(rows, values, (5, 2))
        dist.all_reduce(tensor)
        found.append(tensor.coalesce())
    empty = torch.sparse_coo_tensor(torch.empty(2, 0), torch.empty(0), (3, 2))
    dist.all_reduce(empty)
    found.append(empty.coalesce())
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Linear(4, 1))
    model = DistributedDataParallel(net)
    for step in range(3):
        model.zero_grad()
        model(torch.tensor([step, rank, 7, 7])).square().mean().backward()
        found.append(net[0].weight.grad.coalesce())
        torch.optim.SGD(net.parameters(), 0.1).step()
    return [*found, *(value.detach().clone() for value in net.parameters())]


@pytest.mark.parametrize("task", [collectives, unusual, sparse])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_shm(shm: RankPool, size: int, task: Callable[..., Any], tmp_path: Path) -> None:
    if size == 1 and task is unusual:
        pytest.skip("its messages go to others")
    for gloo, ours in shm.run(
        run_on_gloo_and_ours, str(tmp_path / "f"), "auto", task, size=size, limit=60
    ):
        same(ours, gloo)


@pytest.mark.slow
@pytest.mark.parametrize("carrier", ["mpi", "gloo"])
def test_between_hosts(mpi: RankPool, carrier: str, tmp_path: Path) -> None:
    for gloo, ours in mpi.run(
        run_on_gloo_and_ours, str(tmp_path / "f"), carrier, collectives, limit=60
    ):
        same(ours, gloo)


def run_over_nccl(comm: Any, path: str) -> Any:
    """Collectives of tensors that the stand-in takes for a device's, on a group over NCCL."""
    from tagi_ddp.parallel import ProcessGroup

    dist.Backend.register_backend(
        "over_nccl", lambda *_: ProcessGroup(comm), devices=["cpu", "cuda"]
    )
    results = []
    for backend in ("gloo", "over_nccl"):
        dist.init_process_group(
            backend, f"file://{path}.{backend}", rank=comm.rank, world_size=comm.size
        )
        torch.manual_seed(comm.rank)
        results.append([collectives(), train_by_wrapper(ddp)])
        if backend == "gloo":
            dist.destroy_process_group()
    return results


def test_over_the_stand_in_for_nccl(stand_in: dict[str, str], tmp_path: Path) -> None:
    with doomed_pool("nccl", 2, environment=stand_in) as pool:
        answers = pool.run(run_over_nccl, str(tmp_path / "f"), limit=60)
    for gloo, ours in answers:
        same(ours, gloo)


# --- torch's own data parallelism ------------------------------------------------------------


def train_by_wrapper(wrap: Callable[[nn.Module], nn.Module]) -> list[Tensor]:
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Linear(6, 50), nn.Tanh(), nn.Linear(50, 50), nn.Linear(50, 3)))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    torch.manual_seed(dist.get_rank())
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 6)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    assert losses[0] != losses[-1]
    return losses


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, bucket_cap_mb=0.01)


def fsdp(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def fsdp2(model: nn.Module) -> nn.Module:
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    for part in (*model, model):
        if any(True for _ in part.parameters()):
            fully_shard(part, mesh=mesh)
    return model


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("wrap", [ddp, fsdp, fsdp2])
def test_torchs_wrappers(shm: RankPool, wrap: Callable[..., Any], tmp_path: Path) -> None:
    answers = shm.run(
        run_on_gloo_and_ours, str(tmp_path / "f"), "auto", train_by_wrapper, wrap, size=3, limit=60
    )
    for gloo, ours in answers:
        same(ours, gloo)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "wrap", [ddp, *(pytest.param(each, marks=pytest.mark.slow) for each in (fsdp, fsdp2))]
)
def test_torchs_wrappers_over_mpi(mpi: RankPool, wrap: Callable[..., Any], tmp_path: Path) -> None:
    for gloo, ours in mpi.run(
        run_on_gloo_and_ours, str(tmp_path / "f"), "mpi", train_by_wrapper, wrap, limit=60
    ):
        same(ours, gloo)


# --- what goes wrong -------------------------------------------------------------------------


def make_calls_that_are_refused(comm: Any, path: str) -> list[str]:
    import tagi_ddp.parallel  # noqa: F401

    texts = []
    os.environ["TAGI_DDP_TORCH_CARRIER"] = "pigeon"
    for carrier in ("pigeon", "auto"):
        os.environ["TAGI_DDP_TORCH_CARRIER"] = carrier
        try:
            dist.init_process_group("tagi_ddp", f"file://{path}{carrier}", rank=0, world_size=1)
        except ValueError as error:
            texts.append(str(error))
    calls = [
        lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.PRODUCT),
        lambda: dist.recv(torch.ones(2)),
    ]
    for call in calls:
        try:
            call()
        except ValueError as error:
            texts.append(str(error))
    dist.destroy_process_group()
    return texts


def test_what_is_refused(shm: RankPool, tmp_path: Path) -> None:
    [texts] = shm.run(make_calls_that_are_refused, str(tmp_path / "f"), size=1)
    assert "TAGI_DDP_TORCH_CARRIER must be one of auto, shm, mpi, gloo, got 'pigeon'" in texts[0]
    assert "op must be one of SUM, AVG, MIN, MAX for the backend 'tagi_ddp', got" in texts[1]
    assert "src must be a rank" in texts[2]


def die_before_backward(comm: Any, path: str) -> str:
    import tagi_ddp.parallel  # noqa: F401

    dist.init_process_group("tagi_ddp", f"file://{path}", rank=comm.rank, world_size=comm.size)
    model = DistributedDataParallel(nn.Linear(3, 2))
    if comm.rank == 1:
        os._exit(3)
    try:
        model(torch.ones(4, 3)).sum().backward()
    except Exception as error:
        return str(error)
    return ""


def test_a_rank_that_dies_is_named(shm: RankPool, tmp_path: Path) -> None:
    text, died = shm.run(die_before_backward, str(tmp_path / "f"), size=2, dying=(1,), fresh=True)
    assert isinstance(died, Died)
    assert "rank 1" in text
