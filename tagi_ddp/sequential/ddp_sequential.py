"""DDPSequential: one pytagi network, trained by many processes."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from typing import Any

from numpy.typing import ArrayLike

from tagi_ddp._backend import Agreement, Contribution
from tagi_ddp.checks import flat_floats
from tagi_ddp.communicators import Communicator, CommunicatorError
from tagi_ddp.communicators.topology import topology_of
from tagi_ddp.compute import Choice, Precision, choose, make_compute
from tagi_ddp.engine.buffers import FloatArray
from tagi_ddp.optim.schedule import SyncSchedule
from tagi_ddp.replica.bucket import make_bucket
from tagi_ddp.sequential.config import DDPConfig
from tagi_ddp.sequential.equality import (
    ReplicaMismatch,
    check_state,
    check_structure,
)
from tagi_ddp.sequential.interface import SequentialInterface
from tagi_ddp.sequential.merge_interface import MergeInterface
from tagi_ddp.sequential.placement import adopt, connect, place
from tagi_ddp.update.exchange import Exchange, make_exchange
from tagi_ddp.update.merging import Reduction, check_reduction, make_merging
from tagi_ddp.update.micro_batches import MicroBatches
from tagi_ddp.update.sharded import make_sharded_exchange

# What a Sequential and its layers have before anybody calls set_threads.
_ENGINE_DEFAULT_THREADS, _LAYER_DEFAULT_THREADS = 1, 4


class NotFiniteError(FloatingPointError):
    """A step was refused: deltas of some rank are NaN or infinite; raised on all ranks.

    It has changed no parameter. ``ranks`` are those at fault.
    """

    def __init__(self, message: str, ranks: list[int]) -> None:
        """Keep the ranks beside the text."""
        super().__init__(message)
        self.ranks = tuple(ranks)


class DDPSequential(SequentialInterface, MergeInterface):
    """A pytagi Sequential as one of ``world_size`` replicas that stay equal bit for bit.

    Each rank runs forward and backward on its own share of a batch; `step` sums the deltas of all
    ranks (or takes their mean), caps them and applies the same update everywhere. With
    ``average=False`` the result is that of one process on the union of the shares; with
    ``average=True``, pytagi's default, it is the mean of the deltas, capped as for one share: steps
    about ``world_size`` times more cautious. With ``reduction="precision"`` ranks step alone, and
    their posteriors are merged by Bayes' rule, at every step or less often; see `merge`.

    An error in any method ends the group: it is raised here at once, and on the other ranks, naming
    this one, at their next collective operation.

    Args:
        model: the network. It is trained in place; all ranks must give the same layers. Parameters
            and running statistics of rank 0 win. On the CPU, or, for compute="engine", where
            ``device`` is or will be.
        config: backend, rank and world size; `DDPConfig.from_env` asks the launcher.
        average: True: mean of the deltas; False: their sum, which reproduces one process.
        reduction: "mean" or "sum" of the deltas, in place of ``average``; or "precision", by which
            posteriors are merged.
        sync_every: for "precision": how many steps lie between two merges; or a SyncSchedule, by
            which the ranks of a node merge often, and nodes seldom and without waiting. It needs
            `begin_epoch` and `end_epoch`.
        node_size: for "precision": how many consecutive ranks make a node; None: those of a host.
        sharded: each rank caps and applies the deltas of its part of the parameters only, and all
            take the results: the same bits with less work at each step. Not for "precision".
        communicator: takes the place of ``config``: a communicator, or a
            torch.distributed.ProcessGroup. It stays open when the model is closed.
        compute: who runs forward and backward: "torch", with the same results as "engine" and ten
            to thirty times faster, but for small networks; "auto" takes torch where it can, and
            warns where it cannot.
        device: where it is computed, like "cuda:0"; by default the GPU of the local rank for NCCL,
            else the CPU. There the replica lives; the wrapped model is brought up to date when it
            is read through this object.
        precision: of matrix products and convolutions. "tf32" is for GPUs; "bfloat16" keeps three
            digits of each factor, and sums in float32.

    Raises:
        BackendUnavailable, Timeout, PeerLost: the ranks could not be brought together.
        ReplicaMismatch: the ranks' models differ in their layers.
    """

    def __init__(
        self,
        model: Any,
        config: DDPConfig | None = None,
        average: bool = True,
        *,
        reduction: Reduction | None = None,
        sync_every: int | SyncSchedule = 1,
        node_size: int | None = None,
        sharded: bool = False,
        communicator: Communicator | Any | None = None,
        compute: Choice = "auto",
        device: str | None = None,
        precision: Precision = "float32",
    ) -> None:
        """Bring the ranks together, compare the models and copy rank 0's parameters to all."""
        if (config is None) == (communicator is None):
            raise TypeError("give either config or communicator")
        self._own_communicator = communicator is None
        self.communicator: Communicator
        if config is not None:
            self.communicator, device = connect(config, device)
        else:
            self.communicator, device = adopt(communicator, device)
        self.model = model
        self.config = config or DDPConfig(
            [], "auto", self.communicator.rank, self.communicator.size
        )
        self.reduction = check_reduction(reduction, bool(average), sync_every, node_size, sharded)
        self.average = self.reduction == "mean"
        self._forward_samples: int | None = None  # of the forward pass that backward would follow
        self._delta_samples: int | None = None  # behind the engine's deltas that step would apply
        self._accumulating = False  # until the next step
        self._in_no_sync = False
        self._closed = False
        try:
            with self._or_abort():
                self._attach(compute, device, precision, sync_every, node_size, sharded)
        except BaseException:
            self.close()
            raise

    def _attach(
        self,
        compute: Choice,
        device: str,
        precision: Precision,
        sync_every: int | SyncSchedule,
        node_size: int | None,
        sharded: bool,
    ) -> None:
        replica = place(self.model, compute, device, self.communicator)
        chosen = choose(self.model, replica, compute, device, precision)
        scheme = vars(sync_every) if isinstance(sync_every, SyncSchedule) else sync_every
        options = {"reduction": self.reduction, "compute": chosen, "precision": precision}
        options |= {"sync_every": scheme, "sharded": sharded}
        check_structure(self.communicator, replica, options)
        bucket = None
        if (chosen, device) == ("torch", "cpu"):
            bucket = make_bucket(self.communicator, replica.parameters)
        self.compute = make_compute(chosen, self.model, replica, bucket, device, precision)
        self._replica = self.compute.replica
        self._micro_batches = MicroBatches(self._replica)
        self._set_threads()
        self._replica.share(self.communicator)
        if self.reduction == "precision":
            self._exchange: Exchange = make_merging(
                self.communicator, self._replica, sync_every, node_size
            )
        else:
            make = make_sharded_exchange if sharded else make_exchange
            self._exchange = make(self.communicator, self._replica, bucket)

    def _set_threads(self) -> None:
        """Give the engine this rank's share of the cores, unless the user has set its threads."""
        engine = self.model._cpp_backend
        layers = {layer.handle.num_threads for layer in self._replica.layers}
        share = topology_of(self.communicator).share_of_cores(self.communicator.rank)
        if (engine.num_threads, layers) == (_ENGINE_DEFAULT_THREADS, {_LAYER_DEFAULT_THREADS}):
            self.set_threads(share)
        elif self.compute.name == "torch":
            self.set_threads(engine.num_threads)

    # --- the engine's interface ---------------------------------------------------------------

    def __call__(
        self, mu_x: ArrayLike, var_x: ArrayLike | None = None
    ) -> tuple[FloatArray, FloatArray]:
        """Call `forward`."""
        return self.forward(mu_x, var_x)

    def forward(
        self, mu_x: ArrayLike, var_x: ArrayLike | None = None
    ) -> tuple[FloatArray, FloatArray]:
        """Run the network on this rank's share of a batch.

        Args:
            mu_x: means of the inputs, flat or not, batch * input size floats; a rank without a
                share of this batch passes none, and contributes nothing at `step`.
            var_x: their variances, of the same size; None: the inputs are exact.

        Returns:
            means and variances of the outputs, each flat, batch * output size floats; tensors on
            the replica's device if torch computes and ``mu_x`` is a tensor, which needs no waiting
            for the device.
        """
        with self._or_abort():
            keep = self.compute.name == "torch"
            mean = flat_floats("mu_x", mu_x, keep)
            variance = None if var_x is None else flat_floats("var_x", var_x, keep)
            if variance is not None and len(variance) != len(mean):
                raise ValueError(
                    f"var_x has {len(variance)} elements, mu_x {len(mean)}; give one variance for "
                    "each mean"
                )
            if len(mean) == 0:
                self._forward_samples = 0
                return mean, mean + 0
            self._check_input_size(len(mean))
            try:
                outputs = self.compute.forward(mean, variance)
            except RuntimeError as error:
                raise ValueError(
                    f"the network refused mu_x with {len(mean)} elements: {error}"
                ) from error
            self._forward_samples = self.compute.samples
            return outputs

    def backward(self) -> None:
        """Compute the deltas from ``input_delta_z_buffer``, which the output updater has filled.

        Under `no_sync`, and until the next `step` after it, they add up over calls; otherwise a
        call replaces them.
        """
        with self._or_abort():
            if self._forward_samples is None:
                raise RuntimeError("backward() needs a forward() before it")
            if self._forward_samples and self._accumulating and self._delta_samples:
                self._micro_batches.save(self._delta_samples)
            if self._forward_samples:
                self._exchange.discard()
                self.compute.backward(None if self._accumulating else self._started)
                self._delta_samples = self._forward_samples
            elif not self._accumulating:
                self._exchange.start_nothing()
                self._delta_samples = 0
            elif not self._delta_samples:
                self._delta_samples = 0
            self._forward_samples = None

    def step(self) -> None:
        """Exchange the deltas of all ranks and apply the same update to every replica.

        Raises NotFiniteError, on all ranks and with every parameter as it was, when a delta of any
        rank is NaN or infinite. Where the replicas live on devices and no deltas go over the host,
        nobody waits to learn that: it is raised eight steps later, or by `check_replicas`.
        """
        with self._or_abort():
            if self._in_no_sync:
                raise RuntimeError(
                    "step() inside no_sync() would let replicas differ; end the block"
                )
            if self._delta_samples is None:
                raise RuntimeError("step() needs a backward() before it")
            self._replica.pull()
            samples = self._delta_samples + self._micro_batches.take()
        self._delta_samples, self._accumulating = None, False
        self._update(samples)

    def barrier(self) -> None:
        """Return once every rank has called it."""
        self.communicator.barrier()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load parameters; a collective call. What rank 0 gives is copied to all ranks."""
        with self._or_abort():
            self._replica.export()
            if self.communicator.rank == 0:
                self.model.load_state_dict(state_dict)
            self._replica.share(self.communicator)
            self._exchange.restart()

    def save(self, filename: str) -> None:
        """Write the parameters and running statistics to a file, on rank 0; others do nothing.

        Where posteriors are merged, call `merge` on all ranks before; this warns if steps are left.
        """
        if self.communicator.rank == 0 and self.unmerged_steps:
            warnings.warn(
                f"{filename!r} gets what rank 0 alone has learned in {self.unmerged_steps} steps "
                "since the last merge: call merge() on all ranks before save()",
                RuntimeWarning,
                stacklevel=2,
            )
        if self.communicator.rank == 0:
            self._replica.export()
            self.model.save(filename)

    def load(self, filename: str) -> None:
        """Load what `save` wrote; a collective call. Rank 0 reads, the others receive."""
        with self._or_abort():
            if self.communicator.rank == 0:
                if not os.path.isfile(filename):
                    raise FileNotFoundError(f"filename: there is no file {filename!r} on rank 0")
                self._replica.export()
                self.model.load(filename)
            self._replica.share(self.communicator)
            self._exchange.restart()

    # --- beyond the engine's interface --------------------------------------------------------

    @property
    def has_empty_share(self) -> bool:
        """Whether the last `forward` was given no samples."""
        return self._forward_samples == 0

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let the deltas of several micro-batches add up before one `step` exchanges their sum.

        ``with model.no_sync():`` forward and backward of every micro-batch; then `step`, outside.
        """
        self._in_no_sync = self._accumulating = True
        try:
            yield
        finally:
            self._in_no_sync = False

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """Let ranks run out of batches at different times.

        All ranks run their steps inside ``with model.join():``. Who leaves the block early keeps
        following the others' updates, contributing nothing, until all have left. No other
        collective operation belongs into the block.
        """
        yield
        all_finished = False
        while not all_finished:
            self._replica.pull()
            all_finished = self._update(0, finished=True)

    def check_replicas(self) -> str:
        """Return a hash of all parameters and running statistics, which is equal on all ranks.

        A collective call. Raises ReplicaMismatch, on all ranks, when replicas differ in a single
        bit, naming the first layer that differs; and NotFiniteError, on all ranks, when a step on
        the device was refused of which nobody has been told yet.
        """
        self._tell_refused(everything=True)
        with self._or_abort():
            self._replica.pull()
            self._replica.export()
            try:
                return check_state(self.communicator, self._replica)
            except ReplicaMismatch as error:
                if not self.unmerged_steps:
                    raise
                raise ReplicaMismatch(
                    f"{error} There were {self.unmerged_steps} steps since the last merge: call "
                    "merge() before."
                ) from None

    def close(self) -> None:
        """Leave the group; the model stays usable on its own. May be called again.

        Warns of a step on the device that was refused and of which nobody has been told yet.
        """
        if self._closed:
            return
        self._closed = True
        exchange: Exchange | None = getattr(self, "_exchange", None)
        if exchange is not None:
            exchange.close()
        if self._own_communicator:
            self.communicator.close()
        if exchange is not None and (ranks := exchange.take_refused(everything=True)):
            warnings.warn(
                f"a step before close() was refused: deltas of ranks {ranks} were NaN or infinite. "
                "It has changed no parameter.",
                RuntimeWarning,
                stacklevel=2,
            )

    def __enter__(self) -> DDPSequential:
        """Return the model itself."""
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Close; when the block ended in an error the other ranks learn it."""
        if error is not None:
            self._abort(error)
        self.close()

    def _started(self, begin: int) -> None:
        self._exchange.start(self._replica.parameters, begin)

    # --- stepping -----------------------------------------------------------------------------

    def _update(self, samples: int, finished: bool = False) -> bool:
        """Take part in one update of all ranks; return whether all have finished. Pull before."""
        self._tell_refused(everything=False)
        with self._or_abort():
            parameters = self._replica.parameters
            culprit = self._exchange.first_not_finite(parameters) if samples else ""
            agreement = self._exchange(
                parameters, Contribution(samples, not culprit, finished), self.average
            )
            if not isinstance(agreement, Agreement):  # all ranks learn of a refusal together, later
                return finished and agreement.all_finished()
            if agreement.applies:
                self._exchange.average_statistics(samples, agreement.batch)
                self._replica.updated()
        self._raise_if_refused(agreement, culprit)
        return agreement.all_finished

    def _raise_if_refused(self, agreement: Agreement, culprit: str) -> None:
        if ranks := agreement.not_finite:
            raise NotFiniteError(self._exchange.refusal(ranks, culprit), ranks)

    def _tell_refused(self, everything: bool) -> None:
        """Raise if a step on the device was refused of which nobody has been told."""
        if ranks := self._exchange.take_refused(everything):
            raise NotFiniteError(
                f"an earlier step was refused on all ranks: deltas of ranks {ranks} were NaN or "
                "infinite. It has changed no parameter. Look at the inputs, the targets and the "
                "observation variance of those ranks.",
                ranks,
            )

    def _check_input_size(self, size: int) -> None:
        first = self.model._cpp_backend.layers[0]
        # A recurrent layer's input is a sequence whose length the engine checks itself.
        width = int(first.input_size) or int(first.in_width * first.in_height * first.in_channels)
        if width and size % width:
            raise ValueError(
                f"mu_x has {size} elements, no multiple of the network's input size, {width}"
            )

    @contextlib.contextmanager
    def _or_abort(self) -> Iterator[None]:
        """Let the other ranks know when this one fails, so that none waits for it."""
        if self._closed:
            raise CommunicatorError("the model is closed; wrap it again to go on")
        try:
            yield
        except ReplicaMismatch:
            raise
        except BaseException as error:
            self._abort(error)
            raise

    def _abort(self, error: BaseException) -> None:
        reason = f"{type(error).__name__}: {error}"
        if not isinstance(error, CommunicatorError):
            self.communicator.abort(reason)
        if (exchange := getattr(self, "_exchange", None)) is not None:
            exchange.abort(reason)
