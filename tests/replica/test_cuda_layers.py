"""Finding and verifying the engine's CUDA layers: stand-ins, and the engine's own objects.

The engine makes CUDA objects of layers without parameters where there is no GPU, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.cuda_stand_in import (
    BIAS,
    NUM_WEIGHTS,
    POINTERS,
    RESIDUAL,
    STATISTICS_POINTERS,
    BatchNorm,
    DeviceMemory,
    Layer,
    LayerBlock,
    Model,
    Network,
    Object,
    ResNetBlock,
)

from tagi_ddp import _backend
from tagi_ddp.engine.layers import DELTAS, PARAMETERS
from tagi_ddp.engine.loader import load_engine
from tagi_ddp.engine.pointers import LayoutError, address_of
from tagi_ddp.replica.cuda import CudaReplica
from tagi_ddp.replica.cuda_layers import walk_cuda

NAMES = [
    "0 (Linear())",
    "2.main_block.0 (Conv2dCuda(0,0))",
    "2.main_block.1 (BatchNorm2dCuda(0,0))",
    "2.main_block.2.main_block.0 (Conv2dCuda(0,0))",
    "2.main_block.2.shortcut (BatchNorm2dCuda(0,0))",
    "2.shortcut.0 (Conv2dCuda(0,0))",
    "3.0.main_block (Conv2dCuda(0,0))",
    "4 (BatchNorm2d())",
    "5 (Embedding())",
]


@pytest.fixture
def network() -> Network:
    return Network()


def test_all_layers_are_found_in_place(network: Network) -> None:
    replica = network.replica()
    assert network.memory.number == 3
    assert [layer.name for layer in replica.layers] == NAMES
    assert [layer.kind for layer in replica.layers] == [leaf.kind for leaf in network.leaves]
    assert {layer.handle.num_threads for layer in replica.layers} == {4}
    assert not any(layer.accumulates for layer in replica.layers)
    for arrays, leaf in zip(replica.arrays(), network.leaves, strict=True):
        for name, array in leaf.on_device.items():
            if name not in DELTAS:
                assert arrays[name].data_ptr() == array.ctypes.data
                np.testing.assert_array_equal(arrays[name], array)
        assert ("first_batch" in arrays) == isinstance(leaf, BatchNorm)
    assert replica.arrays()[0]["mu_b"].numel() == 0  # the engine leaves it alone


def test_state_is_the_engines_copy_on_the_host(network: Network) -> None:
    replica = network.replica()
    names = [name for name, _ in replica.state()]
    assert list(dict.fromkeys(names)) == NAMES
    assert names.count(NAMES[2]) == 7  # with running statistics and their flag
    addresses = [array.ctypes.data for _, array in replica.state()]
    for leaf in network.leaves:
        assert leaf.host["var_w"].ctypes.data in addresses


def real_blocks() -> tuple[Any, Any]:
    """Return a Sequential of the engine's own CUDA objects, and the block that they were in."""
    load_engine()
    import cutagi

    def conv(kernel: int) -> Any:
        return cutagi.Conv2d(2, 2, kernel, True, 1, kernel // 2, 1, 8, 8, 1.0, 1.0, "He", 0)

    main_block = cutagi.LayerBlock([conv(3), cutagi.Tanh(), conv(3)])
    block = cutagi.LayerBlock(
        [
            cutagi.ResNetBlock(main_block, cutagi.LayerBlock([cutagi.ReLU(), conv(1)])),
            cutagi.ResNetBlock(cutagi.LayerBlock([conv(3), cutagi.Sigmoid()])),
            cutagi.AvgPool2d(2, 2, 0, 0),
        ]
    )
    block.switch_to_cuda()
    model = Model()
    model._cpp_backend.layers = [*block.layers, cutagi.LayerBlock([block])]
    return model, block


def test_walking_the_engines_own_objects() -> None:
    model, block = real_blocks()
    found = list(walk_cuda(model))
    names = [each.layer.name.split(" ")[0] for each in found]
    residual = [*(f"main_block.{i}" for i in range(3)), "shortcut.0", "shortcut.1"]
    plain = ["main_block.0", "main_block.1"]
    expected = [f"0.{name}" for name in residual] + [f"1.{name}" for name in plain] + ["2"]
    assert names == expected + [f"3.0.{name}" for name in expected]
    kinds = [each.layer.kind.removesuffix("Cuda") for each in found]
    once = ["Conv2d", "Tanh", "Conv2d", "ReLU", "Conv2d", "Conv2d", "Sigmoid", "AvgPool2d"]
    assert kinds == once * 2
    assert [each.key for each in found[:6]] == [
        "Conv2dCuda.main.0.0",
        "TanhCuda.main.0.1",
        "Conv2dCuda.main.0.2",
        "ReLUCuda.shortcut.0.0",
        "Conv2dCuda.shortcut.0.1",
        "Conv2dCuda.main.1.0",
    ]
    assert [each.address for each in found[:8]] == [each.address for each in found[8:]]
    assert found[7].address == address_of(block.layers[2])
    assert _backend.cuda_layer_pointers(found[0].address) == [0] * 8  # without parameters


def test_names_are_those_of_the_engines_state_dict() -> None:
    """The engine adds the same to the names of layers on the CPU, whose state it can tell here."""
    load_engine()
    from pytagi import nn

    def conv() -> Any:
        return nn.Conv2d(2, 2, 3, padding=1, in_width=8, in_height=8)

    layers = [conv(), nn.ReLU()]
    nested = nn.LayerBlock(conv(), nn.ReLU(), nn.ResNetBlock(nn.LayerBlock(*layers)))
    model = nn.Sequential(conv(), nn.ResNetBlock(nested, nn.LayerBlock(conv(), nn.ReLU())))
    model.preinit_layer()
    rng, memory = np.random.default_rng(0), DeviceMemory()

    def stand_in() -> Layer:
        return Layer("Conv2dCuda", 1, 1, memory, rng)

    inner = ResNetBlock(LayerBlock(stand_in(), Object("ReLUCuda")))
    ours = Model(
        stand_in(),
        ResNetBlock(
            LayerBlock(stand_in(), Object("ReLUCuda"), inner),
            LayerBlock(stand_in(), Object("ReLUCuda")),
        ),
    )
    with_parameters = {each.key for each in walk_cuda(ours) if each.layer.kind == "Conv2dCuda"}
    assert with_parameters == {
        key.replace("Conv2d", "Conv2dCuda") for key, values in model.state_dict().items()
    }


@pytest.mark.parametrize("address", [0, 8, 7, 1 << 62])
def test_no_object_there(network: Network, address: int) -> None:
    network.residual.write(RESIDUAL, "<u8", address)
    with pytest.raises(LayoutError, match=r"layer 2\.main_block: there is no layer"):
        network.replica()


def test_another_object_there(network: Network) -> None:
    other = Object("HiddenStateCuda")
    network.residual.write(RESIDUAL + 16, "<u8", other.address)
    with pytest.raises(LayoutError, match=r"layer 2\.shortcut: there is no layer"):
        network.replica()
    other.write(0, "<u8", other.read(0) + 8)  # not where objects point to
    assert _backend.classes_at(other.address) == []


def test_a_layer_on_the_cpu() -> None:
    with pytest.raises(ValueError, match=r"layer 1\.0 is a Linear, on the CPU: call to_device"):
        list(walk_cuda(Model(Object("ReLUCuda"), LayerBlock(Object("Linear")))))


def test_no_parameters() -> None:
    with pytest.raises(ValueError, match="no parameters"):
        CudaReplica(Model(Object("ReLUCuda")), DeviceMemory())


def null(network: Network) -> None:
    network.leaves[1].write(POINTERS + 8, "<u8", 0)


def foreign(network: Network) -> None:
    host = network.leaves[1].host["var_w"]
    host[:] = network.leaves[1].on_device["var_w"]
    network.leaves[1].point(POINTERS + 8, host)


def too_short(network: Network) -> None:
    network.leaves[1].point(POINTERS + 8, network.memory.new(np.ones(17)))


def elsewhere(network: Network) -> None:
    network.leaves[1].point(POINTERS + 8, network.memory.new(np.ones(18)))


def shared(network: Network) -> None:
    leaf = network.leaves[1]
    leaf.point(POINTERS + 8 * 5, leaf.on_device["delta_mu_w"])


def overlapping(network: Network) -> None:
    memory = network.memory.new(np.zeros(19))
    network.leaves[1].point(POINTERS + 8 * 4, memory[:-1])
    network.leaves[1].point(POINTERS + 8 * 5, memory[1:])


def more_weights(network: Network) -> None:
    network.leaves[1].write(NUM_WEIGHTS, "<u8", 19)


def fewer_deltas(network: Network) -> None:
    network.leaves[1].vector(104 + 24 * 5, np.zeros(17, np.float32))


def unused_bias(network: Network) -> None:
    network.linear.write(BIAS, "?", True)


def changed(network: Network) -> None:
    values = network.leaves[1].on_device["var_w"]
    network.leaves[1].to_host = lambda: None  # type: ignore[method-assign]
    for leaf in network.leaves:
        leaf.to_host()
    network.leaves[1].host["var_w"][:] = values
    values[17] = np.nextafter(values[17], np.float32(9))


def statistics_null(network: Network) -> None:
    network.norms[1].write(STATISTICS_POINTERS + 8, "<u8", 0)


def statistics_swapped(network: Network) -> None:
    norm = network.norms[1]
    pointers = [norm.read(STATISTICS_POINTERS + offset) for offset in (8, 0)]
    norm.write(STATISTICS_POINTERS, "<u8", *pointers)


def statistics_of_another(network: Network) -> None:
    public = network.model.get_norm_mean_var()
    public["ResNetBlock()_2"][0].pop()
    network.model.get_norm_mean_var = lambda: public  # type: ignore[method-assign]


def another_name(network: Network) -> None:
    state = network.model.state_dict()
    state["Conv2dCuda.2"] = state.pop("Conv2dCuda.shortcut.2.0")
    network.model.state_dict = lambda: state  # type: ignore[method-assign]


def norm_inside(network: Network) -> None:
    network.leaves[1].write(0, "<u8", Object("LayerNormCuda").read(0))
    network.leaves[1].kind = "LayerNormCuda"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (null, r"main_block\.0 .*: var_w .*null"),
        (foreign, r"main_block\.0 .*: var_w .*not 18 floats"),
        (too_short, r"main_block\.0 .*: var_w .*not 18 floats"),
        (elsewhere, r"main_block\.0 .*: var_w .*not what the engine says"),
        (shared, r"main_block\.0 .*: delta_var_w .*overlaps with .* delta_mu_w"),
        (overlapping, r"main_block\.0 .*: delta_var_w .*overlaps with .* delta_mu_w"),
        (more_weights, r"main_block\.0 .*: mu_w has 18 elements on the host, not 19"),
        (fewer_deltas, r"main_block\.0 .*: delta_var_w has 17 elements on the host, not 18"),
        (unused_bias, r"layer 0 .*: mu_b has 3 elements on the host, not 0"),
        (changed, r"main_block\.0 .*: var_w .*not what the engine says"),
        (statistics_null, r"shortcut .*: var_ra .*null"),
        (statistics_swapped, r"shortcut .*: mu_ra .*not what the engine says"),
        (statistics_of_another, r"ResNetBlock\(\)_2: found 2 layers .*, not 1"),
        (another_name, r"differ in \['Conv2dCuda.2', 'Conv2dCuda.shortcut.2.0'\]"),
        (norm_inside, "LayerNorm is inside of a block"),
    ],
)
def test_refused(network: Network, spoil: Callable[[Network], None], message: str) -> None:
    spoil(network)
    before = network.on_device()
    with pytest.raises(LayoutError, match=message):
        network.replica()
    for array, then in zip(network.memory.arrays, before, strict=True):
        np.testing.assert_array_equal(array, then)


def test_nan_is_equal_to_nan(network: Network) -> None:
    network.linear.on_device["mu_w"][3] = np.nan
    network.replica()


def test_late_parameters_are_drawn_but_not_what_was_loaded() -> None:
    """As the engine does: none before preinit_layer(), which forgets those that are there."""
    memory, rng = DeviceMemory(), np.random.default_rng(0)
    empty, loaded = (Layer("Conv2dCuda", 6, 2, memory, rng) for _ in range(2))
    model = Model(empty, loaded)
    drawn = model.state_dict()
    kept = {
        "Conv2dCuda.1": tuple([float(i + 1)] * len(v) for i, v in enumerate(drawn["Conv2dCuda.1"]))
    }
    states = [{"Conv2dCuda.0": ([], [], [], []), **kept}, drawn]
    for layer in (empty, loaded):
        layer.write(NUM_WEIGHTS, "<u8", 0)

    def preinit_layer() -> None:
        states.pop(0)
        for layer in (empty, loaded):
            layer.write(NUM_WEIGHTS, "<u8", 6)

    def load_state_dict(state: dict[str, Any]) -> None:
        for layer, values in zip((empty, loaded), state.values(), strict=True):
            for name, value in zip(PARAMETERS, values, strict=True):
                layer.on_device[name][:] = value
        states[0] = state

    model.state_dict = lambda: states[0]  # type: ignore[method-assign]
    model._cpp_backend.preinit_layer = preinit_layer
    model.load_state_dict = load_state_dict  # type: ignore[attr-defined]
    CudaReplica(model, memory)
    assert states == [{"Conv2dCuda.0": drawn["Conv2dCuda.0"], **kept}]
