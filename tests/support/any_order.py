"""Calls of pytagi's methods in any order and with any sizes: ``any_order.py COMPUTE FIRST COUNT``.

Runs programs of these numbers, and prints each number before. Errors are answers; a signal is not.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from support.networks import after_series, after_words, last_step, options_of

import tagi_ddp
from tagi_ddp import DDPSequential
from tagi_ddp.communicators.single import SingleCommunicator

MOST = 30  # calls of a program


def networks() -> dict[str, Any]:
    from pytagi.nn import (
        LSTM,
        SLSTM,
        BatchNorm2d,
        Conv2d,
        Embedding,
        EvenExp,
        Linear,
        MixtureReLU,
        ReLU,
        Sequential,
        SLinear,
    )

    def images() -> Any:
        first = Conv2d(1, 2, 3, padding=1, in_width=4, in_height=4)
        return Sequential(first, BatchNorm2d(2), ReLU(), Linear(32, 3))

    return {
        "dense": lambda: Sequential(Linear(3, 9), MixtureReLU(), Linear(9, 2)),
        "pairs": lambda: Sequential(Linear(3, 5), ReLU(), Linear(5, 4), EvenExp()),
        "lstm": lambda: Sequential(LSTM(3, 5, seq_len=1), LSTM(5, 4, seq_len=1), Linear(4, 2)),
        "sequence": lambda: Sequential(
            LSTM(3, 4, seq_len=2, **last_step()), Linear(after_series(4, 2), 1)
        ),
        "smoothing": lambda: Sequential(
            SLSTM(3, 4, seq_len=1), SLSTM(4, 3, seq_len=1), SLinear(3, 1)
        ),
        "not smoothing": lambda: Sequential(SLSTM(3, 4, seq_len=1), Linear(4, 6), SLinear(6, 1)),
        "embedding": lambda: Sequential(
            Embedding(6, 2, 3), *after_words(2, 3), Linear(after_series(2, 3), 2)
        ),
        "images": images,
    }


class Program:
    """One program: a network, and calls that are drawn one by one."""

    def __init__(self, compute: str, number: int, folder: Path) -> None:
        self.rng = np.random.default_rng(number)
        self.folder = folder
        options = options_of(compute)
        self.builders = networks()
        name = self.pick(list(self.builders))
        self.model = self.wrap(name, options)
        self.other = self.wrap(self.pick(list(self.builders)), options)
        self.width = {"sequence": 6, "images": 16}.get(name, 3)
        self.updater, self.own_updater = pytagis_updater(), tagi_ddp.OutputUpdater(self.model)

    def wrap(self, name: str, options: dict[str, str]) -> DDPSequential:
        net = self.builders[name]()
        comm = SingleCommunicator()
        try:
            return DDPSequential(net, average=False, communicator=comm, **options)
        except ValueError:  # torch knows no layers that smooth
            return DDPSequential(net, average=False, communicator=comm, compute="auto")

    def pick(self, choices: Any) -> Any:
        return choices[self.rng.integers(len(choices))]

    def floats(self, *likely: int) -> np.ndarray:
        """Return positive numbers, mostly of a likely size, sometimes of any, or with gaps."""
        size = int(self.pick(likely)) if self.rng.random() < 0.8 else int(self.rng.integers(40))
        values = self.rng.integers(0, 6, size) + self.pick([0, 0, 0.5])
        if size and self.rng.random() < 0.1:
            values = values.astype(np.float64)
            values[0] = self.pick([np.nan, np.inf, -1e38, -3])
        return np.asarray(values, self.pick([np.float32, np.float32, np.float64]))

    def outputs(self, per: int = 1) -> np.ndarray:
        """Return numbers for the outputs of the last batch."""
        compute = self.model.compute
        with contextlib.suppress(Exception):
            return self.floats(compute.samples * compute.output_size // per)
        return self.floats(2, 4, 6)

    def inputs(self) -> np.ndarray:
        return self.floats(*(self.width * batch for batch in (1, 1, 2, 3, 5)))

    def states(self) -> Any:
        states = self.model.get_lstm_states()
        kind = self.pick(["same", "sizes", "layers", "empty", "other"])
        if kind == "sizes":
            return {i: tuple(self.floats(1, 4, 8) for _ in range(4)) for i in states}
        if kind == "layers":
            return {int(self.rng.integers(-1, 5)): parts for parts in states.values()}
        if kind == "empty":
            return {i: tuple(np.zeros(0, np.float32) for _ in range(4)) for i in states}
        return self.other.get_lstm_states() if kind == "other" else states

    def learn(self) -> None:
        given: dict[str, Any] = {"mu_x": self.inputs()}
        if self.rng.random() < 0.3:
            given["var_x"] = self.floats(given["mu_x"].size)
        batch = max(1, given["mu_x"].size // self.width)
        count = batch * self.pick([1, 2, 3, 4])
        given["mu_obs"] = self.floats(count)
        if self.rng.random() < 0.8:
            given["var_obs"] = self.pick([0.5, self.floats(count)])
        if self.rng.random() < 0.4:
            given["selected_idx"] = self.rng.integers(1, 4, count).astype(np.int32)
        self.model.learn(**given)

    def by_pytagis_updater(self) -> None:
        states, deltas = self.model.output_z_buffer, self.model.input_delta_z_buffer
        if self.rng.random() < 0.1:
            deltas = self.other.input_delta_z_buffer
        way = self.pick(["update", "update_using_indices", "update_heteros"])
        given: dict[str, Any] = {"mu_obs": self.outputs(self.pick([1, 1, 2]))}
        if way != "update_heteros":
            given["var_obs"] = self.floats(given["mu_obs"].size)
        if way == "update_using_indices":
            given["selected_idx"] = self.rng.integers(1, 4, given["mu_obs"].size).astype(np.int32)
        if self.rng.random() < 0.5:
            getattr(self.own_updater, way)(**given)
        else:
            getattr(self.updater, way)(output_states=states, delta_states=deltas, **given)

    def resume(self) -> None:
        state = self.model.run_state()
        self.model.load_run_state(lambda rank, name: state[name], 1)

    def micro_batches(self) -> None:
        with self.model.no_sync():
            self.call()
            self.call()

    def calls(self) -> dict[str, Callable[[], object]]:
        """Return calls by name, all of pytagi's public methods and properties among them."""
        model, file = self.model, str(self.folder / "parameters")
        return {
            "forward": lambda: model.forward(self.inputs()),
            "__call__": lambda: model(self.inputs(), self.floats(3, 6)),
            "forward of states": lambda: model(self.other.output_z_buffer),
            "other forward": lambda: self.other(self.floats(3, 6, 12, 16)),
            "updater": self.by_pytagis_updater,
            "backward": model.backward,
            "step": model.step,
            "learn": self.learn,
            "micro-batches": self.micro_batches,
            "train": model.train,
            "eval": model.eval,
            "get_outputs": model.get_outputs,
            "get_input_states": model.get_input_states,
            "get_outputs_smoother": model.get_outputs_smoother,
            "smoother": model.smoother,
            "reset_lstm_states": model.reset_lstm_states,
            "get_lstm_states": lambda: model.get_lstm_states(int(self.rng.integers(-2, 6))),
            "set_lstm_states": lambda: model.set_lstm_states(self.states()),
            "set_delta_z": lambda: model.set_delta_z(self.outputs(), self.outputs()),
            "output_z_buffer": lambda: model.output_z_buffer,
            "input_delta_z_buffer": lambda: model.input_delta_z_buffer,
            "output_delta_z_buffer": lambda: model.output_delta_z_buffer,
            "set input_delta_z_buffer": lambda: setattr(
                model, "input_delta_z_buffer", self.other.output_delta_z_buffer
            ),
            "set output_z_buffer": lambda: setattr(
                model, "output_z_buffer", self.other.output_z_buffer
            ),
            "input_state_update": lambda: setattr(
                model, "input_state_update", bool(self.rng.integers(2))
            ),
            "num_samples": lambda: setattr(
                model, "num_samples", int(self.pick([0, 1, 2, 3, 7, -1]))
            ),
            "state_dict": model.state_dict,
            "load_state_dict": lambda: model.load_state_dict(
                self.pick([self.other, model]).state_dict()
            ),
            "parameters": model.parameters,
            "params_from": lambda: model.params_from(
                self.pick([self.other, self.other.model, self.other.model._cpp_backend, model])
            ),
            "save": lambda: model.save(file),
            "load": lambda: model.load(file),
            "save_csv": lambda: model.save_csv(file),
            "load_csv": lambda: model.load_csv(self.pick([file, file + "_none"])),
            "other save_csv": lambda: self.other.save_csv(file),
            "preinit_layer": model.preinit_layer,
            "set_threads": lambda: model.set_threads(int(self.rng.integers(-1, 4))),
            "to_device": lambda: model.to_device(self.pick(["cpu", "cuda", "cuda:7", ""])),
            "params_to_device": model.params_to_device,
            "params_to_host": model.params_to_host,
            "output_to_host": model.output_to_host,
            "delta_z_to_host": model.delta_z_to_host,
            "get_layer_stack_info": model.get_layer_stack_info,
            "get_neg_var_w_counter": model.get_neg_var_w_counter,
            "get_norm_mean_var": model.get_norm_mean_var,
            # Newer engines have this one.
            "get_attention_scores": lambda: model.get_attention_scores(),
            "layers": lambda: [layer.get_layer_info() for layer in model.layers],
            "device": lambda: model.device,
            "z_buffer_size": lambda: model.z_buffer_size,
            "z_buffer_block_size": lambda: model.z_buffer_block_size,
            "run_state": self.resume,
        }

    def call(self) -> None:
        """Make one of the calls; an error is a right answer."""
        calls = self.calls()
        often = ["learn", "forward", "updater", "backward", "step", "num_samples"]
        self.last = self.pick([*calls, *6 * often])
        with contextlib.suppress(Exception):
            calls[self.last]()


def pytagis_updater() -> Any:
    from pytagi.nn import OutputUpdater

    return OutputUpdater("cpu:0")


def main() -> None:
    compute, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        for number in range(first, first + count):
            print(number, flush=True)
            program = Program(compute, number, Path(folder))
            for _ in range(program.rng.integers(4, MOST)):
                program.call()
                if "-v" in sys.argv:
                    print(program.last, flush=True)


if __name__ == "__main__":
    main()
