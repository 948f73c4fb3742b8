"""The state of a DDPSequential in a checkpoint, from which training continues."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tagi_ddp.communicators.equality import RanksDiffer, all_or_none
from tagi_ddp.communicators.guard import AllRanksRaise
from tagi_ddp.compute.interface import Memory
from tagi_ddp.compute.local_network import LocalNetwork
from tagi_ddp.data import share_of
from tagi_ddp.engine.buffers import FloatArray
from tagi_ddp.engine.layers import PARAMETERS, walk
from tagi_ddp.replica import Replica
from tagi_ddp.replica.equality import ReplicaMismatch, check_state
from tagi_ddp.sequential.saved_state import check_memory, check_merge, require_alike
from tagi_ddp.update.merging import Merging
from tagi_ddp.update.ranks import Ranks
from tagi_ddp.update.saved import merge_saved

_NAMES = (*PARAMETERS, "mu_ra", "var_ra", "first_batch")
# The options that decide the meaning of the ranks' own states.
_DECISIVE = ("reduction", "sync_every", "merge", "compress")

Entries = Callable[[int, str], Any]


class NotBetweenSteps(AllRanksRaise, RuntimeError):
    """A rank is in the middle of a step, so there is no state to save."""


class RunState:
    """`run_state`, `load_run_state` and `check_replicas` of `DDPSequential`."""

    def __init__(self, local: LocalNetwork, ranks: Ranks, options: dict[str, Any]) -> None:
        """Keep the state of ``local``; ``options`` are those that all ranks have alike."""
        self._local, self._replica = local, local.replica
        self._ranks = ranks
        self._options = options
        self._merges = options["reduction"] == "precision"

    def check_replicas(self) -> str:
        """Do what `DDPSequential.check_replicas` says."""
        with self._ranks.or_abort():
            self._ranks.exchange.raise_refused(everything=True)
            self._replica.pull()
            self._replica.export()
            try:
                return check_state(self._ranks.communicator, self._replica)
            except ReplicaMismatch as error:
                if not self._ranks.exchange.steps:
                    raise
                steps = self._ranks.exchange.steps
                raise ReplicaMismatch(
                    f"{error} There were {steps} steps since the last merge: call merge() before."
                ) from None

    def run_state(self) -> dict[str, Any]:
        """Do what `DDPSequential.run_state` says."""
        remedy = "Save after step(), on all ranks."
        with all_or_none(self._ranks.communicator, "run states", remedy, NotBetweenSteps):
            if not self._local.accumulation.between_steps:
                raise NotBetweenSteps("there are deltas of a backward() that no step() has applied")
        with self._ranks.or_abort():
            self._ranks.exchange.raise_refused(everything=True)
            self._replica.pull()
            self._replica.export()
            own = self._merges or self._ranks.communicator.rank == 0
            return {
                "options": {name: self._options[name] for name in _DECISIVE},
                "layout": self._layout(),
                "layers": [layer.name for layer in walk(self._local.model)],
                "parameters": named_parameters(self._replica) if own else {},
                "exchange": self._ranks.exchange.state_dict(),
                "memory": self._memory(),
                "lasting": self._local.compute.memory().lasting,
            }

    def check_run_state(self, entry: Entries, ranks: int) -> Callable[[], None]:
        """Check as `DDPSequential.load_run_state` does; return a function that loads the state."""
        rank, size = self._ranks.communicator.rank, self._ranks.communicator.size
        saved: list[dict[str, Any]] = []  # the states of this rank, or of all that it needs
        with all_or_none(self._ranks.communicator, "run states", "Nothing was loaded.") as same:
            alike = ranks == size and entry(rank, "layout") == self._layout()
            alike &= entry(0, "options") == {name: self._options[name] for name in _DECISIVE}
            if rank == 0:
                with suppress(KeyError):  # Earlier versions did not save it.
                    self._check_layers(entry(0, "layers"))
            names = ["memory", "exchange"]
            if alike or rank == 0:
                names += ["parameters", "lasting"]
            for other in [rank] if alike else range(ranks):
                first = other == 0 or rank == 0
                saved.append({n: entry(other, n) for n in names if first or alike or n == "memory"})
            self._check_saved(saved, alike)
            same("ranks and options as before", alike)

        def load() -> None:
            with self._ranks.or_abort():
                if alike:
                    self._load_own(saved[0])
                else:
                    self._load_together(saved)
                self._local.accumulation.forwarded = self._local.accumulation.samples = None

        return load

    def _check_saved(self, saved: list[dict[str, Any]], same: bool) -> None:
        rank, merges = self._ranks.communicator.rank, bool(saved[0]["exchange"])
        own = self._ranks.exchange.state_dict()
        for number, state in enumerate(saved):
            check_memory(self._memory(), state["memory"])
            if "lasting" in state:
                require_alike("lasting", self._local.compute.memory().lasting, state["lasting"])
            if merges or (rank == 0 and number == 0):
                if "parameters" in state:
                    check_fits(named_parameters(self._replica), state["parameters"])
                if not same and "exchange" in state and merges:
                    check_merge(state["exchange"], 2 * self._replica.parameters.size)
        if same:
            require_alike("exchange", own, saved[0]["exchange"])
        elif merges and own:
            then = saved[0]["exchange"]
            for name in ["counters", *({"schedule", "epoch"} & own.keys() & then.keys())]:
                require_alike(f"exchange/{name}", own[name], then[name])

    def _load_own(self, own: Mapping[str, Any]) -> None:
        self._remember(own["memory"], own["lasting"])
        load_parameters(self._replica, own["parameters"])
        if not self._merges:
            self._replica.share(self._ranks.communicator)
        self._ranks.exchange.load_state_dict(own["exchange"])
        self._ranks.exchange.count_lasting(own["lasting"])

    def _load_together(self, saved: Sequence[Mapping[str, Any]]) -> None:
        rank, replica = self._ranks.communicator.rank, self._replica
        memories = [state["memory"] for state in saved]
        if rank == 0:
            lasting = [
                np.sum(parts, 0) for parts in zip(*(s["lasting"] for s in saved), strict=True)
            ]
        else:
            lasting = [deltas * 0 for deltas in self._local.compute.memory().lasting]
        self._remember(_shared(memories, rank, self._ranks.communicator.size), lasting)
        exchange = saved[0]["exchange"]
        if rank == 0:
            arrays = [state["parameters"] for state in (saved if exchange else saved[:1])]
            posteriors = []
            for parameters in arrays:
                load_parameters(self._replica, parameters)
                replica.pull()
                posteriors.append(np.zeros(2 * replica.parameters.size, np.float32))
                replica.parameters.read_posterior(posteriors[-1])
            if exchange and len(saved) > 1:
                states = [state["exchange"] for state in saved]
                posterior = merge_saved(replica.on_host, posteriors, states)
                load_parameters(self._replica, _mean_statistics(arrays, states))
                replica.pull()
                replica.parameters.write_posterior(posterior)
                replica.updated()
                replica.export()
        replica.share(self._ranks.communicator)
        self._ranks.exchange.restart()
        if exchange and isinstance(self._ranks.exchange, Merging):
            self._ranks.exchange.go_on(exchange)
        self._ranks.exchange.count_lasting(lasting)

    # --- the parts ----------------------------------------------------------------------------

    def _check_layers(self, saved: list[str]) -> None:
        own = [layer.name for layer in walk(self._local.model)]
        for mine, other in zip_longest(own, saved, fillvalue="none"):
            if mine != other:
                raise RanksDiffer(
                    f"the layer saved as {other} is {mine} in this network, and the layers before "
                    "are the same: give the network that was saved, or another folder"
                )

    def _layout(self) -> list[int]:
        nodes = self._ranks.exchange.nodes if isinstance(self._ranks.exchange, Merging) else 1
        return [self._ranks.communicator.size, nodes]

    def _memory(self) -> dict[str, Any]:
        memory = self._local.compute.memory()
        return {
            "batch": self._local.computes.batch,
            "samples": memory.samples,
            "lstm": {
                index: [np.asarray(part, np.float32) for part in parts]
                for index, parts in memory.lstm.items()
            },
        }

    def _remember(self, memory: Mapping[str, Any], lasting: list[FloatArray]) -> None:
        if memory["batch"] is not None:
            self._local.computes.choose_for(memory["batch"])
        lstm: Any = {index: tuple(parts) for index, parts in memory["lstm"].items()}
        samples = memory["samples"] if any(len(parts[0]) for parts in lstm.values()) else 0
        self._local.compute.remember(Memory(samples, lstm, lasting))


def named_parameters(replica: Replica) -> dict[str, NDArray[Any]]:
    """Return views of all arrays of a replica, by names like "0.mu_w"."""
    numbers: dict[str, int] = {}
    named = {}
    for layer, array in replica.state():
        number = numbers[layer] = numbers.get(layer, -1) + 1
        named[f"{layer}.{_NAMES[number]}"] = array
    return named


def check_fits(own: Mapping[str, NDArray[Any]], saved: Mapping[str, NDArray[Any]]) -> None:
    """Raise RanksDiffer, naming the first array, unless ``saved`` is of the ``own`` network."""
    sizes = {name: array.size for name, array in own.items()}
    theirs = {name: array.size for name, array in saved.items()}
    if sizes != theirs:
        name = next(n for n in [*sizes, *theirs] if sizes.get(n) != theirs.get(n))
        raise RanksDiffer(
            f"{name} has {theirs.get(name, 'no')} numbers in what was saved, and "
            f"{sizes.get(name, 'none')} in this network: give the network that was saved"
        )
    require_alike("parameters", own, saved)


def load_parameters(replica: Replica, parameters: Mapping[str, NDArray[Any]]) -> None:
    """Write the arrays of `named_parameters`, all of them or none."""
    if parameters:
        replica.pull()
        replica.export()
        for name, array in named_parameters(replica).items():
            array[...] = parameters[name]
        replica.push()


def _shared(memories: list[dict[str, Any]], rank: int, ranks: int) -> dict[str, Any]:
    """Return this rank's part of the layers' states of all ranks, in their order."""
    samples = sum(memory["samples"] for memory in memories)
    if not memories[0]["lstm"] or not samples:
        return memories[0]
    part = share_of(samples, rank, ranks)
    lstm = {}
    for index, parts in memories[0]["lstm"].items():
        whole = [
            np.concatenate(
                [m["lstm"][index][k].reshape(m["samples"], -1) for m in memories if m["samples"]]
            )
            for k in range(len(parts))
        ]
        lstm[index] = [np.ravel(each[part]) for each in whole]
    own = part.stop - part.start
    batch = memories[0]["batch"]
    return {"batch": own if batch else batch, "samples": own, "lstm": lstm}


def _mean_statistics(
    arrays: list[Mapping[str, NDArray[Any]]], states: list[dict[str, Any]]
) -> dict[str, NDArray[Any]]:
    """Return rank 0's arrays, with running statistics averaged by samples since the last merge."""
    samples = np.array([state["counters"]["_samples"] for state in states], np.float64)
    weights = samples / samples.sum() if samples.any() else np.eye(len(states))[0]
    mean = dict(arrays[0])
    for name in mean:
        if name.endswith(("mu_ra", "var_ra")):
            mean[name] = np.average([each[name] for each in arrays], 0, weights).astype(np.float32)
    return mean
