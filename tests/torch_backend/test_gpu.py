"""torch's backend "tagi_ddp" with tensors on GPUs; skipped where there is none.

Where there is one GPU, two ranks share it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel.support import torch_group
from support.on_device import gpus, why_not
from support.rank_pool import doomed_pool
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.gpu


def collectives(device: str) -> list[Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    one, two, three = (torch.randn(6 * size).to(device) for _ in range(3))
    found = [one]
    for view in (one, two.view(2, -1).T, two[::2]):
        dist.all_reduce(view)
    dist.broadcast(two, size - 1)
    gathered = torch.empty(6 * size * size, device=device)
    dist.all_gather_into_tensor(gathered, three)
    part = torch.empty(6, device=device)
    work = dist.reduce_scatter_tensor(part, one, async_op=True)
    work.wait()
    exchanged = torch.empty_like(three)
    dist.all_to_all_single(exchanged, three)
    to, of = (rank + 1) % size, (rank - 1) % size
    received = torch.empty_like(three)
    if size > 1:
        pair = [dist.P2POp(dist.isend, three, to), dist.P2POp(dist.irecv, received, of)]
        for work in dist.batch_isend_irecv(pair):
            work.wait()
        found.append(received)
    dist.barrier()
    return [each.cpu() for each in (*found, two, gathered, part, exchanged)]


def losses(device: str, wrap: Any) -> list[Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 50), nn.Tanh(), nn.Linear(50, 3)).to(device)
    model = wrap(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    torch.manual_seed(dist.get_rank())
    found = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 6).to(device)).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.detach().cpu())
    return found


def by_ddp(net: nn.Module) -> nn.Module:
    return DistributedDataParallel(net, bucket_cap_mb=0.01)


def by_fsdp(net: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(net, device_id=next(net.parameters()).device)


def run_on_cpu_and_gpu(comm: Any, path: str) -> list[list[Tensor]]:
    results = []
    with torch_group(comm, path):
        for where in ("cpu", comm.device):
            if where.startswith("cuda"):
                torch.cuda.set_device(where)
            results.append(collectives(where))
            results[-1] += losses(where, by_ddp) + losses(where, by_fsdp)
    return results


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("size", [1, 2])
def test_as_on_the_cpu(size: int, tmp_path: Path) -> None:
    if reason := why_not(size):
        pytest.skip(reason)
    with doomed_pool("nccl", size, **gpus(size)) as pool:
        answers = pool.run(run_on_cpu_and_gpu, str(tmp_path / "f"), limit=120)
    for here, there in answers:
        torch.testing.assert_close(there, here, rtol=1e-4, atol=1e-5)
