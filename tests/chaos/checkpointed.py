"""Training that saves, makes collective calls of its own, and notes each state, for chaos jobs."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tagi_ddp.checkpoint import Checkpoints, DamagedFile, read_tree
from tagi_ddp.checkpoint.folder import Folder
from tagi_ddp.sequential.run_state import named_parameters


def digest(parameters: Mapping[str, Any]) -> str:
    """Return a hash of the arrays of a replica."""
    whole = hashlib.sha256()
    for name in sorted(parameters):
        whole.update(np.ascontiguousarray(parameters[name]).tobytes())
    return whole.hexdigest()[:16]


def train(
    model: Any,
    folder: Path,
    loop: tuple[Any, int, int],
    learn: Callable[[int, Any], None],
    tell: Callable[..., None],
    every: int,
    keep: int,
) -> None:
    """Make all steps of a loop; save after ``every`` few, and add up numbers in other steps.

    loop: the sampler, the size of global batches and the number of epochs. Tells the state after
    each step, by the number of steps that have been made.
    """
    sampler, size, epochs = loop

    def tell_state(steps: int) -> None:
        model._local.replica.pull()
        model._local.replica.export()
        tell(step=steps, state=digest(named_parameters(model._local.replica)))

    with Checkpoints(folder / "checkpoints", model, sampler=sampler, keep=keep) as checkpoints:
        first = checkpoints.resume()
        tell_state(first)
        for step, share in model.steps(sampler, size, epochs, first):
            learn(step, share)
            tell_state(model.steps_made)
            if step % every == 0:
                numbers = np.ones(3)
                model.survive(lambda numbers=numbers: model.communicator.all_reduce(numbers))
            if step % every == every - 1:
                checkpoints.save(step + 1)
                tell_state(model.steps_made)  # a loss lets the others merge before they save


def saved_states(folder: Path) -> Iterator[tuple[str, int, str]]:
    """Yield (name, steps, state) of the files of all whole checkpoints."""
    for checkpoint in Folder(folder / "checkpoints").whole():
        try:
            files = [checkpoint.file_of(rank) for rank in range(checkpoint.ranks)]
            saved = [read_tree(file, "parts", "model", "parameters") for file in files]
        except (DamagedFile, OSError):  # removed by the job meanwhile
            if checkpoint.path.exists():
                raise
            continue
        yield from ((checkpoint.path.name, checkpoint.step, digest(each)) for each in saved if each)


def false_checkpoints(
    saved: Iterable[tuple[str, int, str]], lines: Iterable[Mapping[str, Any]]
) -> list[str]:
    """Return the checkpoints with a state that no rank has had after as many steps."""
    states: defaultdict[int, set[str]] = defaultdict(set)
    for line in lines:
        if "state" in line:
            states[line["step"]].add(line["state"])
    return [
        f"{name} holds no state of {steps} steps"
        for name, steps, state in saved
        if state not in states[steps]
    ]


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """Return all that the ranks have told."""
    texts = [path.read_text() for path in sorted(folder.glob("*.jsonl"))]
    return [json.loads(line) for text in texts for line in text.splitlines()]
