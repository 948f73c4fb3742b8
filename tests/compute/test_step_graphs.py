"""`cuda_graph=True`: steps that are replayed learn what steps taken one by one do.

Without a GPU, a tape of torch's operators stands in for CUDA's graphs: like these it repeats every
operation on the same memory and with the same numbers, whatever Python would have done.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.engines import require_single_rows
from support.networks import NETWORKS, SIGMA_V, after_series, distance, fresh, last_step, parameters
from support.rank_pool import RankPool
from support.waiting import no_waiting
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from compute.test_output_updater import INPUTS, WAYS, network, observations
from tagi_ddp import DDPSequential, NotFiniteError, OutputUpdater, accelerate
from tagi_ddp.compute import step_graphs
from tagi_ddp.replica.device_agreement import LAG

DEVICE = "cpu:0"  # a stand-in for a GPU
CAPTURED = [name for name in NETWORKS if name != "lstm"]


class Tape(TorchDispatchMode):
    """Records operations; what they changed in memory from before is set back at the end."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []
        self._made: set[int] = set()  # addresses of memory that the operations gave
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for value in tensors((args, kwargs)):
            storage = value.untyped_storage()
            if storage.data_ptr() not in self._made | self._before.keys():
                whole = torch.tensor([], dtype=torch.uint8).set_(storage)
                self._before[storage.data_ptr()] = whole, whole.clone()
        result = function(*args, **(kwargs or {}))
        known = self._before.keys()
        self._made |= {t.untyped_storage().data_ptr() for t in tensors(result)} - known
        self._calls.append((function, args, kwargs or {}, result))
        return result

    @torch.inference_mode()
    def end(self) -> None:
        for whole, values in self._before.values():
            whole.copy_(values)

    @torch.inference_mode()
    def replay(self) -> None:
        for function, args, kwargs, result in self._calls:
            again = function(*args, **kwargs)
            for old, new in zip(tensors(result), tensors(again), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def capture(run: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any]:
    tape = Tape()
    with torch.inference_mode(), tape:
        result = run()
    tape.end()
    return tape.replay, result


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graphs, "_CAPTURES", "cpu")
    monkeypatch.setattr(step_graphs, "_capture", capture)


def both(name: str, device: str = DEVICE) -> list[DDPSequential]:
    return [accelerate(fresh(name), "torch", device, cuda_graph=graph) for graph in (False, True)]


def batch(name: str, seed: int, size: int, device: str = DEVICE) -> list[torch.Tensor]:
    return [torch.from_numpy(a).to(device) for a in NETWORKS[name].batch(seed, size)]


Outputs = list[tuple[torch.Tensor, torch.Tensor]]


def assert_equal(device: str, ours: Outputs, theirs: Outputs) -> None:
    """Compare bit by bit; on a GPU by norms, as cuDNN adds up in another order in each run."""
    for pair, others in zip(ours, theirs, strict=True):
        for mine, other in zip(pair, others, strict=True):
            assert mine.shape == other.shape
            if device == DEVICE:
                np.testing.assert_array_equal(mine, other)
            else:
                error = torch.linalg.vector_norm(mine - other)
                assert error < 1e-4 * torch.linalg.vector_norm(other)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("name", CAPTURED)
def test_equal_to_steps_one_by_one(
    name: str, accelerator: str, request: pytest.FixtureRequest
) -> None:
    """Of two sizes of batches, without waiting for a GPU, and after another state was loaded."""
    if name == "embedding":
        require_single_rows()  # else it has an LSTM
    if accelerator == DEVICE:
        request.getfixturevalue("stand_in")
    plain, graphs = both(name, accelerator)
    state = copy.deepcopy(plain.run_state())  # with running statistics that have seen nothing
    batches = [batch(name, step, 20 - step % 2, accelerator) for step in range(LAG + 12)]

    def learn_all(model: DDPSequential, some: slice) -> Outputs:
        return [model.learn(x, y, SIGMA_V**2) for x, y in batches[some]]

    first, then = slice(0, 10), slice(10, None)  # all is captured in the first ones
    expected = learn_all(plain, first) + learn_all(plain, then)
    outputs = learn_all(graphs, first)
    with no_waiting(accelerator):
        outputs += learn_all(graphs, then)
    assert_equal(accelerator, outputs, expected)
    for model in (plain, graphs):
        model(batch(name, 99, 5, accelerator)[0])
        model.load_run_state(lambda rank, name: state[name], 1)
    assert_equal(accelerator, *(learn_all(model, first) for model in (graphs, plain)))
    assert len(graphs._training.graphs._graphs) == 2
    if accelerator != DEVICE:
        assert distance(parameters(graphs), parameters(plain)) < 1e-5
        return
    assert distance(parameters(plain), parameters(graphs)) == 0
    assert plain.check_replicas() == graphs.check_replicas()
    np.testing.assert_array_equal(plain.get_outputs(), graphs.get_outputs())
    assert plain.get_neg_var_w_counter() == graphs.get_neg_var_w_counter()


def test_inputs_of_another_type(stand_in: None) -> None:
    plain, graphs = both("mlp")
    for step in range(8):
        x, y = batch("mlp", step, 6)
        outputs = [model.learn((10 * x).to(torch.int16), y, 0.25) for model in (plain, graphs)]
        for ours, theirs in zip(*outputs, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    assert len(graphs._training.graphs._graphs) == 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("to_input", [False, True])
def test_every_way_to_learn(way: str, to_input: bool, stand_in: None) -> None:
    """Inputs with variances, every kind of observations, and the innovation of the inputs."""
    last = "EvenExp" if way == "update_heteros" else ""
    plain, graphs = (
        accelerate(network(last), "torch", DEVICE, cuda_graph=graph) for graph in (False, True)
    )
    rng = np.random.default_rng(0)
    for model in (plain, graphs):
        model.input_state_update = to_input
    for _ in range(6):
        x, spread = torch.from_numpy(rng.random((2, 4, INPUTS), np.float32))
        seen = {k: torch.from_numpy(v) for k, v in observations(rng, way, 4).items()}
        for model in (plain, graphs):
            model.learn(x, var_x=spread, **seen)
            if to_input:
                model.inputs = model.get_input_states()
    assert len(graphs._training.graphs._graphs) == 1
    assert distance(parameters(plain), parameters(graphs)) == 0
    if to_input:
        np.testing.assert_array_equal(plain.inputs, graphs.inputs)


def test_a_refused_step_is_told_later(stand_in: None) -> None:
    _, model = both("mlp")
    x, y = batch("mlp", 0, 6)
    for _ in range(5):
        model.learn(x, y, 0.25)
    before = model.check_replicas()
    model.learn(x * np.inf, y, 0.25)
    with pytest.raises(NotFiniteError, match="earlier step"):
        model.check_replicas()
    assert model.check_replicas() == before
    model.learn(x * np.inf, y, 0.25)
    for _ in range(LAG - 1):
        model.learn(x, y, 0.25)
    with pytest.raises(NotFiniteError, match="earlier step"):
        model.learn(x, y, 0.25)
    assert len(model._training.graphs._graphs) == 1


def test_inputs_that_torch_follows(stand_in: None) -> None:
    _, model = both("mlp")
    x, y = batch("mlp", 0, 6)
    for _ in range(6):
        mean, variance = model.learn(x.requires_grad_(), y, 0.25)
        assert not mean.requires_grad
        assert not variance.requires_grad
    (graph,) = model._training.graphs._graphs.values()
    assert not any(part.requires_grad for part in graph.inputs.values())


def test_what_comes_between(stand_in: None) -> None:
    """Micro-batches, evaluation and steps of other sizes, which are taken one by one."""
    plain, graphs = both("batch_norm")
    for step in range(8):
        x, y = batch("batch_norm", step, 6)
        for model in (plain, graphs):
            model.learn(x, y, 0.25)
            with pytest.raises(RuntimeError, match="needs a forward"):
                model.backward()
            with model.no_sync():
                model(x)
                OutputUpdater(model).update(y, y * 0 + 1)
                model.backward()
            model.learn(*batch("batch_norm", 50 + step, 3 + step), 0.5)
            model.eval()
            model(x)
            model.train()
    assert len(graphs._training.graphs._graphs) == 1
    assert distance(parameters(plain), parameters(graphs)) == 0
    graphs.eval()
    with pytest.raises(RuntimeError, match="train"):
        graphs.learn(x, y, 0.25)


def train_ranks_with_graphs(comm: Any, cuda_graph: bool) -> tuple[str, int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_graphs, "_CAPTURES", "cpu")
        patch.setattr(step_graphs, "_capture", capture)
        model = DDPSequential(
            fresh("batch_norm"), communicator=comm, device=DEVICE, cuda_graph=cuda_graph
        )
        for step in range(12):  # every second one without a share for rank 1
            size = (3 + comm.rank) * (step % 2 == 0 or comm.rank == 0)
            model.learn(*batch("batch_norm", 2 * step + comm.rank, size), 0.25)
    return model.check_replicas(), len(
        model._training.graphs._graphs
    ) if model._training.graphs else 0


def test_ranks(shm: RankPool) -> None:
    """Train two ranks with graphs and without. The replicas are equal; each rank has one graph."""
    plain, graphs = (shm.run(train_ranks_with_graphs, option, size=2) for option in (False, True))
    assert {digest for digest, _ in plain} == {digest for digest, _ in graphs}
    assert [count for _, count in graphs] == [1, 1]


def test_fallbacks_say_why(stand_in: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def takes_one_by_one(model: DDPSequential, x: Any, y: Any, reason: str) -> None:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(5):
                model.learn(x, y, 0.25)
        (warning,) = told
        assert f"without a CUDA graph, as {reason}" in str(warning.message)
        assert warning.filename == __file__
        assert model._training.graphs is not None
        assert not model._training.graphs._graphs
        plain = accelerate(fresh("mlp"), "torch", DEVICE)
        for _ in range(5):
            plain.learn(x, y, 0.25)
        assert plain.check_replicas() == model.check_replicas()

    x, y = batch("mlp", 0, 6)
    takes_one_by_one(both("mlp")[1], x, y.numpy(), "mu_obs is no tensor on cpu")
    monkeypatch.setattr(step_graphs, "_MOST", 0)
    takes_one_by_one(both("mlp")[1], x, y, "0 sizes of batches have one")
    monkeypatch.undo()
    monkeypatch.setattr(step_graphs, "_CAPTURES", "cpu")  # and torch without CUDA captures nothing
    takes_one_by_one(both("mlp")[1], x, y, "the capture failed: ")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"compute": "torch", "device": "cpu"}, "the network is on cpu, not on a GPU"),
        ({"compute": "native"}, 'compute is "native"'),
        ({"compute": "engine"}, 'compute is "engine"'),
    ],
)
def test_where_there_are_no_graphs(options: dict[str, Any], reason: str) -> None:
    with pytest.warns(RuntimeWarning, match=reason):
        model = accelerate(fresh("mlp"), **options, cuda_graph=True)
    model.learn(*NETWORKS["mlp"].batch(0, 6), 0.25)


@pytest.mark.parametrize("in_block", [False, True])
def test_states_are_not_captured(in_block: bool, stand_in: None) -> None:
    from pytagi.nn import LSTM, LayerBlock, Linear, Sequential

    layers = [LSTM(2, 6, seq_len=4), LSTM(6, 6, seq_len=4, **last_step())]
    model = Sequential(
        *([LayerBlock(*layers)] if in_block else layers), Linear(after_series(6, 4), 3)
    )
    with pytest.warns(RuntimeWarning, match="LSTM layers keep states"):
        accelerate(model, device=DEVICE, cuda_graph=True)
