"""Settings: what they take, what they refuse and how, and where they come from."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.fsdp import ShardingStrategy

from tagi_ddp.parallel import (
    BaseTrainer,
    CheckpointConfig,
    ParallelConfig,
    Task,
    TrainerParallelConfig,
)

MEMBERS = st.sampled_from(list(ShardingStrategy))


@dataclass
class Own(TrainerParallelConfig):
    rate: float = 0.1
    layers: list[int] | None = None


def test_defaults_and_order() -> None:
    config = TrainerParallelConfig("a", "b", "c", "d", True)
    assert (config.name, config.exp_name, config.exp_dir, config.log_dir_name) == tuple("abcd")
    assert config.parallel == ParallelConfig(False, False, ShardingStrategy.HYBRID_SHARD, True)
    assert config.checkpoint == CheckpointConfig(None, False)
    other = TrainerParallelConfig()
    assert (other.name, other.exp_name, other.exp_dir) == ("???", "${ml.exp_name:null}", "???")
    other.parallel.use_fsdp = True
    assert not config.parallel.use_fsdp


@given(MEMBERS)
def test_a_strategy_is_an_enum_a_name_or_a_number(strategy: ShardingStrategy) -> None:
    for value in (strategy, strategy.name, strategy.value):
        config = ParallelConfig(sharding_strategy=value)  # type: ignore[arg-type]
        assert config.sharding_strategy is strategy
        config = ParallelConfig.from_args([f"sharding_strategy={getattr(value, 'name', value)}"])
        assert config.sharding_strategy is strategy


WRONG: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: ParallelConfig(use_fsdp=1.0), TypeError, r"use_fsdp must be true or false, got 1\.0"),
    (lambda: ParallelConfig(use_fsdp=2), TypeError, "use_fsdp must be true or false, got 2"),
    (lambda: ParallelConfig.from_args(["use_fsdp=2"]), TypeError, "use_fsdp must be true or false"),
    (lambda: ParallelConfig(cpu_offload="maybe"), TypeError, "cpu_offload must be true or false"),
    (lambda: ParallelConfig(sync_module_states=None), TypeError, "sync_module_states must be"),
    (
        lambda: ParallelConfig(sharding_strategy="HALF_SHARD"),
        ValueError,
        r"sharding_strategy must be one of FULL_SHARD \(1\), .*, got 'HALF_SHARD'",
    ),
    (lambda: ParallelConfig(sharding_strategy=9), ValueError, "sharding_strategy .* got 9"),
    (lambda: ParallelConfig(sharding_strategy=True), ValueError, "sharding_strategy .* got True"),
    (
        lambda: ParallelConfig.from_dict({"use_fdsp": True}),
        ValueError,
        "use_fdsp is no setting; there are use_fsdp, cpu_offload, sharding_strategy, sync_module",
    ),
    (
        lambda: setattr(ParallelConfig(), "use_fdsp", True),
        AttributeError,
        "use_fdsp is no setting; there are use_fsdp",
    ),
    (
        lambda: TrainerParallelConfig.from_dict({"parallel": {"sharding_strategy": "x"}}),
        ValueError,
        "^parallel.sharding_strategy must be one of",
    ),
    (
        lambda: TrainerParallelConfig.from_dict({"parallel": {"fsdp": 1}}),
        ValueError,
        "^parallel.fsdp is no setting",
    ),
    (
        lambda: TrainerParallelConfig(parallel=3),
        TypeError,
        "^parallel must be a ParallelConfig or a mapping, got 3",
    ),
    (
        lambda: TrainerParallelConfig.from_args(["checkpoint.save_every_n_steps=0"]),
        ValueError,
        "^checkpoint.save_every_n_steps must be at least 1, got 0",
    ),
    (lambda: CheckpointConfig(2.5), TypeError, "save_every_n_steps must be an integer, got 2.5"),
    (lambda: TrainerParallelConfig(name=[7]), TypeError, r"name must be a string, got \[7\]"),
    (lambda: Own(rate="fast"), TypeError, "rate must be a number, got 'fast'"),
    (lambda: Own.from_args(["rate"]), TypeError, "rate must be a number, got None"),
    (lambda: Own.from_args(["name=["]), ValueError, r"\['name=\['\] is no YAML"),
    (lambda: Own.from_args(["rate=${speed}"]), ValueError, "rate: .*'speed' not found"),
    (lambda: Own.from_args(["layers=[1,x]"]), TypeError, r"layers must be .*, got \[1, 'x'\]"),
    (lambda: Own(layers=3), TypeError, "layers must be .*, got 3"),
]


@pytest.mark.parametrize(("make", "kind", "text"), WRONG)
def test_what_is_wrong_is_named(make: Callable[[], Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        make()


def test_changes_are_checked() -> None:
    config = ParallelConfig()
    config.sharding_strategy = "NO_SHARD"  # type: ignore[assignment]
    assert config.sharding_strategy is ShardingStrategy.NO_SHARD
    with pytest.raises(TypeError, match="use_fsdp must be"):
        config.use_fsdp = "maybe"  # type: ignore[assignment]
    assert config.use_fsdp is False


@given(st.booleans(), st.booleans(), MEMBERS, st.none() | st.integers(1, 9))
def test_all_ways_lead_to_the_same(
    fsdp: bool, offload: bool, strategy: ShardingStrategy, every: int | None
) -> None:
    parallel = {"use_fsdp": fsdp, "cpu_offload": offload, "sharding_strategy": strategy.name}
    mapping = {"name": "n", "parallel": parallel, "checkpoint": {"save_every_n_steps": every}}
    made = Own(
        "n",
        checkpoint=CheckpointConfig(every),
        parallel=ParallelConfig(fsdp, offload, strategy),
    )
    assert Own.from_dict(mapping) == made
    args = [f"parallel.{name}={value}" for name, value in parallel.items()]
    every_text = "null" if every is None else every
    assert made == Own.from_args(["name=n", *args, f"checkpoint.save_every_n_steps={every_text}"])


def test_yaml(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("name: run\nlayers: [3, 4]\nparallel:\n  use_fsdp: true\n")
    assert Own.from_yaml(path) == Own("run", layers=[3, 4], parallel=ParallelConfig(True))
    path.write_text("")
    assert Own.from_yaml(path) == Own()
    for text, error, kind in [
        ("parallel: {use_fsdp: maybe}", "config.yaml: parallel.use_fsdp must be", TypeError),
        ("- 3", r"config.yaml: expected names and values, got \[3\]", TypeError),
        ("{", "config.yaml is no YAML", ValueError),
    ]:
        path.write_text(text)
        with pytest.raises(kind, match=error):
            Own.from_yaml(path)


def test_conversions() -> None:
    config = Own("run", rate=np.float32(2), layers=(3, 4))  # type: ignore[arg-type]
    assert (config.rate, config.layers) == (2.0, [3, 4])
    config.checkpoint = {"save_every_n_steps": np.int64(5)}  # type: ignore[assignment]
    assert config.checkpoint == CheckpointConfig(5)
    config = Own.from_args(["name=3", "rate=1", "rate=2", "parallel.use_fsdp=yes"])
    assert config == Own("3", rate=2.0, parallel=ParallelConfig(True))


def test_interpolations() -> None:
    args = ["name=run", "exp_dir=results/${name}", "exp_name=${ml.exp_name:null}"]
    assert Own.from_args(args) == Own("run", exp_dir="results/run")
    args = ["checkpoint.save_every_n_steps=3", "rate=${checkpoint.save_every_n_steps}"]
    assert Own.from_args(args).rate == 3.0


def test_without_omegaconf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "omegaconf", None)
    assert ParallelConfig().use_fsdp is False
    for make in (lambda: Own.from_args([]), lambda: Own(rate=1)):
        with pytest.raises(ImportError, match=r"pip install '\.\[parallel\]'"):
            make()


def test_what_must_be_given(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"name must be given: TrainerParallelConfig\(name=...\)"):
        BaseTrainer(TrainerParallelConfig(exp_dir="x"))
    with pytest.raises(ValueError, match="exp_dir must be given"):
        BaseTrainer(TrainerParallelConfig(name="x"))
    trainer: BaseTrainer[Any, Any, Task]
    trainer = BaseTrainer(TrainerParallelConfig("run", exp_dir=str(tmp_path)))
    assert (trainer.exp_name, trainer.log_dir) == ("run", tmp_path / "logs")
    trainer = BaseTrainer(TrainerParallelConfig("run", "series", str(tmp_path), "out"))
    assert (trainer.exp_name, trainer.log_dir) == ("series", tmp_path / "out")
