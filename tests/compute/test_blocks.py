"""Layers in a row and residual blocks, in each other too; a small ResNet."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compute.oracle import compare

CHANNELS, SIZE = 4, 4
TOLERANCE = 1e-4  # of a whole network

# What is in a chain: kinds of layers, and nested chains of blocks. No two activations in a row.
Item = Any
LAYERS = [["conv"], ["norm"], ["conv", "ReLU"], ["norm", "MixtureReLU"]]


def _blocks(chains: st.SearchStrategy[list[Item]]) -> st.SearchStrategy[list[Item]]:
    first = st.sampled_from([[], ["ReLU"]])  # which must not overwrite what others need
    inner = st.builds(lambda first, items: first + items, first, chains)
    # The engine allocates the shortcut's memory by the sizes that only convolutions know at first.
    shortcut = st.none() | inner.map(lambda items: [*items, "conv"])
    block = st.tuples(st.just("block"), inner)
    residual = st.tuples(st.just("residual"), inner, shortcut)
    items = st.sampled_from(LAYERS) | st.builds(lambda item: [item], block | residual)
    return st.lists(items, min_size=1, max_size=3).map(
        lambda parts: list(chain.from_iterable(parts))
    )


CHAINS = st.recursive(st.sampled_from(LAYERS), _blocks, max_leaves=5)


def conv(inputs: int, outputs: int, kernel: int = 3, **options: Any) -> Any:
    import pytagi.nn as nn

    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, **options)


def build(items: list[Item]) -> list[Any]:
    import pytagi.nn as nn

    layers = []
    for item in items:
        if item == "conv":
            layers.append(conv(CHANNELS, CHANNELS))
        elif item == "norm":
            layers.append(nn.BatchNorm2d(CHANNELS))
        elif isinstance(item, str):
            layers.append(getattr(nn, item)())
        elif item[0] == "block":
            layers.append(nn.LayerBlock(*build(item[1])))
        else:
            branches = [nn.LayerBlock(*build(part)) for part in item[1:] if part is not None]
            layers.append(nn.ResNetBlock(*branches))
    return layers


@settings(deadline=None, max_examples=60)
@given(
    items=CHAINS,
    activation=st.sampled_from([[], ["ReLU"]]),
    batch=st.integers(2, 5),
    seed=st.integers(0, 2**31 - 1),
)
def test_nested(items: list[Item], activation: list[Item], batch: int, seed: int) -> None:
    def layers() -> list[Any]:
        import pytagi
        import pytagi.nn as nn

        pytagi.manual_seed(seed)
        # The engine cannot begin with a block.
        first = conv(2, CHANNELS, in_width=SIZE, in_height=SIZE)
        last = nn.Linear(CHANNELS * SIZE * SIZE, 4)
        return [first, *build([*activation, *items]), last]

    compare(layers, 2 * SIZE * SIZE, batch, seed, tolerance=TOLERANCE)


def _alone(where: str) -> tuple[Any, int]:
    """Return a block of 4 channels of 4 x 4 with a single layer there, and its outputs."""
    import pytagi.nn as nn

    def main(outputs: int) -> Any:
        return nn.LayerBlock(conv(4, outputs), nn.ReLU(), conv(outputs, outputs))

    half = {"stride": 2, "padding_type": 2}
    blocks: dict[str, tuple[Callable[[], Any], int]] = {
        "chain": (lambda: nn.LayerBlock(conv(4, 8)), 128),
        "main": (lambda: nn.ResNetBlock(nn.LayerBlock(conv(4, 8)), main(8)), 128),
        "identity": (lambda: nn.ResNetBlock(nn.LayerBlock(conv(4, 4))), 64),
        # With less outputs than inputs the engine's innovation goes on with what its buffers
        # happen to hold; those of a shortcut hold zeros.
        "less": (lambda: nn.ResNetBlock(main(3), nn.LayerBlock(conv(4, 3))), 48),
        "more": (lambda: nn.ResNetBlock(main(8), nn.LayerBlock(conv(4, 8))), 128),
        "half": (
            lambda: nn.ResNetBlock(
                nn.LayerBlock(conv(4, 6, **half), nn.BatchNorm2d(6)),
                nn.LayerBlock(nn.Conv2d(4, 6, 2, stride=2)),
            ),
            24,
        ),
        # not in a LayerBlock: not passed by
        "layer": (lambda: nn.ResNetBlock(main(8), conv(4, 8)), 128),
        "pool": (
            lambda: nn.ResNetBlock(
                nn.LayerBlock(conv(4, 4), nn.AvgPool2d(2, 2)), nn.AvgPool2d(2, 2)
            ),
            16,
        ),
    }
    make, outputs = blocks[where]
    return make(), outputs


@pytest.mark.parametrize(
    "where", ["chain", "main", "identity", "less", "more", "half", "layer", "pool"]
)
def test_a_single_layer(where: str) -> None:
    """The engine's backward passes by a layer that is alone in its LayerBlock."""

    def layers() -> list[Any]:
        import pytagi
        import pytagi.nn as nn

        pytagi.manual_seed(0)
        block, outputs = _alone(where)
        first = conv(2, 4, in_width=4, in_height=4)
        return [first, nn.ReLU(), block, nn.ReLU(), nn.Linear(outputs, 3)]

    compare(layers, 32, 5, tolerance=TOLERANCE)


@pytest.mark.parametrize("activation", ["ReLU", "MixtureReLU"])
@pytest.mark.parametrize("exact", [False, True])
def test_small_resnet(activation: str, exact: bool) -> None:
    def layers() -> list[Any]:
        import pytagi
        import pytagi.nn as nn

        pytagi.manual_seed(0)
        act = getattr(nn, activation)
        halved = {"stride": 2, "padding_type": 2}

        def block(inputs: int, outputs: int, **options: Any) -> Any:
            return nn.LayerBlock(
                conv(inputs, outputs, bias=False, **options),
                nn.BatchNorm2d(outputs),
                act(),
                conv(outputs, outputs, bias=False),
                nn.BatchNorm2d(outputs),
            )

        shortcut = nn.LayerBlock(nn.Conv2d(4, 6, 2, stride=2, bias=False), nn.BatchNorm2d(6))
        return [
            *[conv(3, 4, bias=False, in_width=8, in_height=8), nn.BatchNorm2d(4), act()],
            *[nn.ResNetBlock(block(4, 4)), act()],
            *[nn.ResNetBlock(block(4, 6, **halved), shortcut), act()],
            *[nn.AvgPool2d(4, 4), nn.Linear(6, 5)],
        ]

    compare(layers, 192, 6, exact=exact, tolerance=TOLERANCE)
