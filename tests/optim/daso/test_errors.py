"""DASO: arguments, errors of one rank and of all, scalers, and beginning again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.rank_pool import RankPool
from torch import nn

from tagi_ddp.communicators import CommunicatorError, PeerLost
from tagi_ddp.communicators.single import SingleCommunicator
from tagi_ddp.optim.daso import DASO, DataParallelMultiGPU


def optimizer_of(*parameters: nn.Parameter) -> torch.optim.SGD:
    return torch.optim.SGD(parameters or [nn.Parameter(torch.zeros(2))], 0.1)


def make(optimizer: Any = None, **arguments: Any) -> DASO:
    options = {"total_epochs": 10, "comm": SingleCommunicator(), **arguments}
    return DASO(optimizer or optimizer_of(), **options)


WRONG_TYPES = {
    "optimizer": ("sgd", r"local_optimizer must be a torch\.optim\.Optimizer, got 'sgd'"),
    "total_epochs": (2.0, r"total_epochs must be an integer, got 2\.0"),
    "comm": ("world", r"comm must be a communicator, .*, got 'world'"),
    "warmup_epochs": ("4", "warmup_epochs must be an integer, got '4'"),
    "cooldown_epochs": (None, "cooldown_epochs must be an integer, got None"),
    "scheduler": (torch.optim.lr_scheduler, "scheduler must be a .*LRScheduler, got <module"),
    "stability_level": ("a", "stability_level must be a number, got 'a'"),
    "max_global_skips": (8.0, r"max_global_skips must be an integer, got 8\.0"),
    "sending_chunk_size": (1e7, r"sending_chunk_size must be an integer, got 10000000\.0"),
    "downcast_type": ("half", r"downcast_type must be a torch\.dtype, got 'half'"),
    "use_mpi_groups": (1, "use_mpi_groups must be a bool, got 1"),
    "skip_reduction_factor": (True, "skip_reduction_factor must be an integer, got True"),
    "local_skip_factor": ([4], r"local_skip_factor must be an integer, got \[4\]"),
    "verbose": ("yes", "verbose must be a bool, got 'yes'"),
    "node_size": (2.0, r"node_size must be an integer, got 2\.0"),
    "local_weight": (None, "local_weight must be a number, got None"),
}
WRONG_VALUES = {
    "total_epochs": (0, "total_epochs must be at least 1, got 0"),
    "warmup_epochs": (-1, "warmup_epochs must be at least 0, got -1"),
    "cooldown_epochs": (-1, "cooldown_epochs must be at least 0, got -1"),
    "stability_level": (-0.1, r"stability_level must be 0 or more, got -0\.1"),
    "max_global_skips": (0, "max_global_skips must be at least 1, got 0"),
    "sending_chunk_size": (0, "sending_chunk_size must be at least 1, got 0"),
    "downcast_type": (torch.int8, r"downcast_type must be one of torch\.bfloat16, .* got torch.in"),
    "skip_reduction_factor": (1, "skip_reduction_factor must be at least 2, got 1"),
    "local_skip_factor": (0, "local_skip_factor must be at least 1, got 0"),
    "node_size": (0, "node_size must be at least 1, got 0"),
    "local_weight": (-1, "local_weight must be 0 or more, got -1"),
}


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_wrong_types_come_before_wrong_values(name: str) -> None:
    value, text = WRONG_TYPES[name]
    for other, (wrong, _) in WRONG_VALUES.items():
        arguments = {other: wrong, name: value}
        with pytest.raises(TypeError, match=text):
            make(**arguments)


@pytest.mark.parametrize("name", WRONG_VALUES)
def test_wrong_values(name: str) -> None:
    value, text = WRONG_VALUES[name]
    with pytest.raises(ValueError, match=text):
        make(**{name: value})


def test_a_scheduler_of_another_optimizer() -> None:
    foreign = torch.optim.lr_scheduler.StepLR(optimizer_of(), 1)
    with pytest.raises(ValueError, match="scheduler must be one of local_optimizer, got one of SG"):
        make(scheduler=foreign)


def test_optimizers_and_schedulers_that_cannot_be_stepped() -> None:
    with pytest.raises(TypeError, match="LBFGS, which needs one"):
        make(torch.optim.LBFGS([nn.Parameter(torch.zeros(1))]))
    optimizer = optimizer_of()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(TypeError, match="got ReduceLROnPlateau: step it yourself"):
        make(optimizer, scheduler=plateau)
    with pytest.raises(TypeError, match="parameters must be real"):
        make(optimizer_of(nn.Parameter(torch.zeros(1, dtype=torch.complex64))))


def test_attributes(capsys: pytest.CaptureFixture[str]) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = optimizer_of(parameter)
    with make(optimizer, warmup_epochs=1, cooldown_epochs=1, total_epochs=6, verbose=True) as daso:
        assert daso.local_optimizer is optimizer
        assert daso.params_ref == [parameter]
        assert (daso.loc_gpus, daso.scheduler, daso.amp, daso.last_batch) == (1, None, False, None)
        assert (daso.cast_dtype, daso.verbose, daso.comm.size) == (torch.bfloat16, True, 1)
        assert (daso.split, daso.split_val, daso.split_inds) == (None, 10_000_000, None)
        assert (daso.max_gs, daso.warmup_epochs, daso.cooldown_epochs) == (8, 1, 1)
        assert (daso.total_epochs, daso.skip_reduction_factor, daso.local_skip_factor) == (6, 2, 4)
        found = []
        for epoch in range(6):
            assert daso.epoch == epoch
            found.append((daso.global_skip, daso.local_skip, daso.batches_to_wait))
            daso.epoch_loss_logic(torch.tensor(1.0), loss_globally_averaged=epoch % 2 == 0)
        assert found == [(0, 1, 0), (8, 2, 2), (8, 2, 2), (4, 1, 1), (4, 1, 1), (0, 1, 0)]
        assert (daso.stability.best, daso.stability.epochs, daso.stability.level) == (1.0, 0, 0.05)
        daso.reset()
        assert (daso.epoch, daso.global_skip, daso.stability.best) == (0, 0, float("inf"))
        daso.print0("a", "b", sep="-")
        daso.verbose = False
        daso.print0("silent")
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 7
    assert printed[2].startswith("epoch 2: loss 1; next: cycling, global_skip 4, local_skip 1")
    assert printed[-1] == "a-b"


def splits(comm: Any) -> list[Any]:
    found = []
    for size in (10, 4, 3):
        parameters = [nn.Parameter(torch.zeros(7)), nn.Parameter(torch.zeros(3))]
        optimizer = optimizer_of(*parameters)
        with DASO(optimizer, 5, comm, sending_chunk_size=size, node_size=1) as daso:
            found += [daso.split, daso.split_val, daso.split_inds]
    return found


def test_how_what_is_sent_is_split(shm: RankPool) -> None:
    expected = [False, 10, None, True, 4, [4, 8], True, 3, [3, 6, 9]]
    assert shm.run(splits, size=2) == [expected] * 2


def test_wrong_calls() -> None:
    daso = make()
    for error in (RuntimeError, ValueError):
        with pytest.raises(error, match="last_batch is not set"):
            daso.step()
    with pytest.raises(TypeError, match=r"last_batch must be an integer, got 2\.0"):
        daso.last_batch = 2.0  # type: ignore[assignment]
    with pytest.raises(ValueError, match="last_batch must be at least 1, got 0"):
        daso.last_batch = 0
    daso.last_batch = 1
    daso.step()
    with pytest.raises(RuntimeError, match=r"all 1 batches .* such as len\(loader\), not"):
        daso.step()
    with pytest.raises(TypeError, match="loss must be a number, got 'low'"):
        daso.epoch_loss_logic("low")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"loss must be one number, got a tensor of shape \(2,\)"):
        daso.epoch_loss_logic(torch.zeros(2))
    with pytest.raises(TypeError, match="loss_globally_averaged must be a bool, got 1"):
        daso.epoch_loss_logic(1.0, 1)  # type: ignore[arg-type]
    for error in (FloatingPointError, ValueError):
        with pytest.raises(error, match="the loss of all ranks is nan"):
            daso.epoch_loss_logic(float("nan"))
    with pytest.raises(TypeError, match=r"scaler must be a torch\.amp\.GradScaler, got None"):
        daso.add_scaler(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got 3"):
        daso.set_model(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"module must be a torch\.nn\.Module, got 3"):
        DataParallelMultiGPU(3, daso)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="optimizer must be a DASO, got None"):
        DataParallelMultiGPU(nn.Linear(1, 1), None)  # type: ignore[arg-type]
    state = daso.state_dict()
    with pytest.raises(ValueError, match=r"state lacks \['batch'\]"):
        daso.load_state_dict({k: v for k, v in state.items() if k != "batch"})
    with pytest.raises(ValueError, match=r"state has rank: none, this DASO 0; give the same"):
        daso.load_state_dict({**state, "settings": {}})
    with pytest.raises(ValueError, match="state has one for scheduler"):
        daso.load_state_dict({**state, "scheduler": {}})
    daso.close()
    daso.close()
    with pytest.raises(CommunicatorError, match="this DASO is closed; make a new one"):
        daso.epoch_loss_logic(1.0)


def test_a_process_group() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with make(comm=dist.group.WORLD) as daso:
            daso.last_batch = 1
            daso.step()
        with pytest.raises(CommunicatorError, match="closed"):
            daso.comm.barrier()
    finally:
        dist.destroy_process_group()


def caught(error: Exception) -> tuple[str, str]:
    return type(error).__mro__[2].__name__, str(error)


def nan(comm: Any, node_size: int, warmup: int) -> list[Any]:
    """Return when this rank raised, what, and what its parameters were then."""
    x = nn.Parameter(torch.zeros(3))
    options = {"node_size": node_size, "cooldown_epochs": 0}
    daso = DASO(optimizer_of(x), 5, comm, warmup, **options)
    daso.last_batch = 20
    found = []
    for batch in range(20):
        x.grad = torch.ones(3)
        if comm.rank == 3 and batch == 5:
            x.grad[1] = torch.nan
        try:
            daso.step()
        except FloatingPointError as error:
            found = [batch, *caught(error), x.detach().numpy().copy()]
            break
    try:
        daso.reset()
        daso.epoch_loss_logic(torch.inf if comm.rank == 1 else 1.0)
    except FloatingPointError as error:
        found.append(str(error))
    daso.close()
    return found


@pytest.mark.parametrize(
    ("node_size", "warmup", "when"),
    [(2, 1, 5), (2, 0, 10), (1, 0, 10), (4, 0, 5)],  # sent after 8, merged after 10
)
def test_all_ranks_raise_for_one_nan(shm: RankPool, node_size: int, warmup: int, when: int) -> None:
    for rank, (batch, *kinds, text, x, loss) in enumerate(shm.run(nan, node_size, warmup)):
        assert batch == when, rank
        assert kinds == ["FloatingPointError"]
        assert "NaN or infinite" in text
        at_fault = node_size < 4 and rank // node_size == 3 // node_size
        assert np.isfinite(x).all() != at_fault
        assert loss == "the loss of all ranks is inf: look at each rank's"


def models(comm: Any) -> tuple[str, str]:
    net = nn.Linear(2, 3 if comm.rank == 1 else 2)
    with DASO(optimizer_of(), 5, comm) as daso:
        try:
            daso.set_model(net)
        except ValueError as error:
            return caught(error)
    return "", ""


def test_models_that_differ(shm: RankPool) -> None:
    for kind, text in shm.run(models, size=2):
        assert kind == "ValueError"
        assert "models differ first at model weight of rank 1: float32[3, 2]; rank 0 has" in text
    assert shm.run(lambda comm: comm.size, size=2) == [2, 2]  # goes on working


def no_luck(*_: Any) -> None:
    raise OSError("no such luck")


def fail_in_a_step(comm: Any, inside: bool) -> str:
    x = nn.Parameter(torch.zeros(1))
    try:
        optimizer = optimizer_of(x)
        if inside and comm.rank == 2:
            optimizer.register_step_pre_hook(no_luck)
        with DASO(optimizer, 5, comm, 0, node_size=2) as daso:
            daso.last_batch = 9
            for _ in range(9):
                if comm.rank == 2 and not inside:
                    no_luck()
                daso.step()
    except PeerLost as error:
        return str(error)
    except OSError:
        return "own"
    return ""


@pytest.mark.parametrize("inside", [True, False])
def test_a_rank_that_fails(shm: RankPool, inside: bool) -> None:
    texts = shm.run(fail_in_a_step, inside, fresh=True, timeout=20)
    assert texts.pop(2) == "own"
    for text in texts:
        assert "no such luck" in text


def scaled(comm: Any, scaler_on: bool, clip: bool) -> list[Any]:
    torch.manual_seed(0)
    net = nn.Linear(3, 1)
    daso = DASO(torch.optim.SGD(net.parameters(), 0.1), 3, comm, 1, 1, node_size=2)
    daso.set_model(net)
    scaler = torch.amp.GradScaler("cpu", 1024.0 * 2**comm.rank, growth_interval=4)
    if scaler_on:
        daso.add_scaler(scaler)
    daso.last_batch = 6
    found = []
    for number in range(18):
        daso.zero_grad()
        generator = torch.Generator().manual_seed(number * 4 + comm.rank)
        loss = net(torch.randn(5, 3, generator=generator)).square().mean()
        (scaler.scale(loss) if scaler_on else loss).backward()
        if scaler_on and clip:
            scaler.unscale_(daso.local_optimizer)
        daso.step()
        found.append(net.weight.detach().numpy().copy())
        if number % 6 == 5:
            daso.epoch_loss_logic(1.0)
    before, scale = net.weight.detach().numpy().copy(), scaler.get_scale()
    daso.reset()
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, torch.inf if comm.rank == 3 else 1.0)
    if scaler_on:
        daso.step()
    now = net.weight.detach().numpy().copy()
    daso.close()
    return [np.array(found), before, now, scaler.get_scale() / scale]


def test_gradient_scalers(shm: RankPool) -> None:
    plain, *others = (
        shm.run(scaled, scaler_on, clip)
        for scaler_on, clip in ((False, False), (True, False), (True, True))
    )
    for scaled_ranks in others:
        for rank, ((expected, *_), (found, before, now, change)) in enumerate(
            zip(plain, scaled_ranks, strict=True)
        ):
            np.testing.assert_allclose(found, expected, atol=1e-6)
            # Node 1 has skipped the step together; in node 0 it was made.
            assert change == (0.5 if rank == 3 else 1.0)
            assert np.abs(now - before).max() > 0
            assert np.isfinite(now).all()


@pytest.mark.filterwarnings("ignore")  # the older type is deprecated, and warns without a GPU
def test_both_types_of_scalers() -> None:
    daso = make()
    for scaler in (torch.amp.GradScaler("cpu", enabled=False), torch.cuda.amp.GradScaler()):
        assert not scaler.is_enabled()
        daso.add_scaler(scaler)
        assert daso.amp
        daso.last_batch = 1
        daso.step()
        daso.epoch_loss_logic(1.0)


def again(comm: Any) -> tuple[list[float], list[float]]:
    """Return what is held after an epoch cut short, and after one begun anew."""
    x = nn.Parameter(torch.zeros(()))
    daso = DASO(optimizer_of(x), 20, comm, 0, 0, node_size=2, downcast_type=torch.float)
    daso.last_batch = 20
    found = []
    for batches in (1, 2, 6, 9, 10, 12):  # a copy is in flight after 1, 2, 9 and 10 batches
        for _ in range(batches):
            x.grad = torch.full((), 1.0 + comm.rank)
            daso.step()
        daso.epoch_loss_logic(0.5**daso.epoch)
        assert daso.global_skip == 8
        assert not daso._nodes.busy
        found.append(x.item())
    for _ in range(9):
        x.grad = torch.full((), 1.0 + comm.rank)
        daso.step()
    assert daso._nodes.busy == (comm.rank % 2 == 1)
    daso.reset()
    assert daso.epoch == 0
    assert not daso._nodes.busy
    for _ in range(20):
        x.grad = torch.full((), 1.0 + comm.rank)
        daso.step()
    daso.epoch_loss_logic(1.0)
    daso.close()
    return found, [x.item()]


def test_short_epochs_and_reset(shm: RankPool) -> None:
    results = shm.run(again)
    assert all(result == results[0] for result in results)
    short, anew = results[0]
    assert (np.diff([0.0, *short, *anew]) < 0).all()
    assert short[0] == pytest.approx(-0.25)  # the mean of one batch, by all ranks
    # Nodes are at -0.3 and -0.7 from there, merge a copy that was at -0.25 for both, and average.
    assert short[1] == pytest.approx(-0.25 - 0.375)
