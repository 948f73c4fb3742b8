"""Three networks for square grey images, to be imported by the examples."""

from pytagi.nn import (
    AvgPool2d,
    BatchNorm2d,
    Conv2d,
    LayerBlock,
    Linear,
    ReLU,
    ResNetBlock,
    Sequential,
)


def mlp(side, outputs):
    hidden = [Linear(side * side, 256), ReLU(), Linear(256, 256), ReLU()]
    return Sequential(*hidden, Linear(256, outputs))


def cnn(side, outputs):
    return Sequential(
        Conv2d(1, 16, 3, padding=1, in_width=side, in_height=side),
        ReLU(),
        AvgPool2d(2, 2),
        Conv2d(16, 32, 3, padding=1),
        ReLU(),
        AvgPool2d(2, 2),
        Linear(32 * (side // 4) ** 2, 100),
        ReLU(),
        Linear(100, outputs),
    )


def resnet(side, outputs):
    # Batch normalisation takes the statistics of one rank's share of a batch, so that the result
    # depends a little on the number of ranks. The networks above do not.
    def unit(channels_in, channels, **options):
        conv = Conv2d(channels_in, channels, bias=False, **options)
        return [conv, ReLU(), BatchNorm2d(channels)]

    same = {"kernel_size": 3, "padding": 1}
    half = {"kernel_size": 3, "padding": 1, "padding_type": 2, "stride": 2}
    shortcut = LayerBlock(*unit(8, 16, kernel_size=2, stride=2))
    return Sequential(
        *unit(1, 8, in_width=side, in_height=side, **same),
        ResNetBlock(LayerBlock(*unit(8, 8, **same), *unit(8, 8, **same))),
        ReLU(),
        ResNetBlock(LayerBlock(*unit(8, 16, **half), *unit(16, 16, **same)), shortcut),
        ReLU(),
        AvgPool2d(side // 2),
        Linear(16, outputs),
    )


NETWORKS = {"mlp": mlp, "cnn": cnn, "resnet": resnet}
