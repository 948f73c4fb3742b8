import numpy as np
import pytest

from tagi_ddp.communicators.config import DDPConfig


def test_defaults_and_order_are_pytagis():
    config = DDPConfig([0, 1])
    assert (config.device_ids, config.backend, config.rank, config.world_size) == (
        [0, 1],
        "nccl",
        0,
        1,
    )
    assert DDPConfig([3], "shm", 1, 2) == DDPConfig(
        device_ids=[3], backend="shm", rank=1, world_size=2
    )


def test_properties_are_writable():
    config = DDPConfig([], "shm")
    config.world_size = 4
    config.rank = 3
    config.backend = "gloo"
    config.device_ids = (np.int64(2), 0)
    assert config == DDPConfig([2, 0], "gloo", 3, 4)
    config.timeout = 12.34567891
    assert eval(repr(config)) == config != DDPConfig([2, 0], "gloo", 3, 4)
    config.timeout = 300
    assert config != DDPConfig([2, 0], "gloo", 2, 4)
    assert config != "gloo"
    assert eval(repr(config)) == config


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"device_ids": [-1]}, ValueError, r"device_ids\[0\].*got -1"),
        ({"device_ids": [0, True]}, TypeError, r"device_ids\[1\].*got True"),
        ({"device_ids": [0.0]}, TypeError, r"device_ids\[0\].*got 0.0"),
        ({"device_ids": "01"}, TypeError, "device_ids.*got '01'"),
        ({"device_ids": 0}, TypeError, "device_ids.*got 0"),
        ({"backend": "tcp"}, ValueError, "backend must be one of auto, nccl.*got 'tcp'"),
        ({"backend": None}, ValueError, "backend.*got None"),
        ({"world_size": 0}, ValueError, "world_size must be at least 1 .*got 0"),
        ({"world_size": 2.0}, TypeError, "world_size.*got 2.0"),
        ({"rank": 1}, ValueError, r"rank must be 0 to 0 \(world_size is 1\), got 1"),
        ({"rank": -1}, ValueError, "rank.*got -1"),
        ({"rank": False}, TypeError, "rank.*got False"),
        ({"timeout": 0}, ValueError, "timeout must be a positive, finite number of sec.*got 0"),
        ({"timeout": "long"}, TypeError, "timeout must be a number, got 'long'"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, text):
    with pytest.raises(error, match=text):
        DDPConfig(**{"device_ids": [0], "backend": "shm", **arguments})
    config = DDPConfig([0], "shm")
    for name, value in arguments.items():
        with pytest.raises(error, match=text):
            setattr(config, name, value)
    assert config == DDPConfig([0], "shm")


def test_the_world_cannot_shrink_below_the_rank():
    config = DDPConfig([], "shm", 1, 2)
    with pytest.raises(ValueError, match=r"world_size must be at least 2 \(rank is 1\), got 1"):
        config.world_size = 1


def test_from_env_takes_the_launchers_place(monkeypatch):
    for name, value in {"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(f"TAGI_DDP_{name}", str(value))
    assert DDPConfig.from_env() == DDPConfig([0, 1], "auto", 3, 4)
    assert DDPConfig.from_env("shm", [5]) == DDPConfig([5], "shm", 3, 4)
    with pytest.raises(ValueError, match="backend"):
        DDPConfig.from_env("tcp")
