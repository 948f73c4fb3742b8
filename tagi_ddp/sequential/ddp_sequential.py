"""DDPSequential: one pytagi network, trained by many processes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from numpy.typing import ArrayLike

from tagi_ddp.communicators import Communicator, CommunicatorError
from tagi_ddp.communicators.guard import CanAbort, Closing, or_abort, report
from tagi_ddp.communicators.single import SingleCommunicator
from tagi_ddp.compute import (
    Choice,
    ComputeByBatch,
    NativeCompute,
    Precision,
    choose,
    make_compute,
)
from tagi_ddp.compute.rollback import Rollback
from tagi_ddp.engine.buffers import FloatArray
from tagi_ddp.engine.layers import require_even, sample_shape, swaps_in_samples
from tagi_ddp.engine.output_updater import check_sizes_of_updates
from tagi_ddp.engine.threads import new_lock, one_at_a_time
from tagi_ddp.optim.schedule import SyncSchedule
from tagi_ddp.replica.staging import host_bucket
from tagi_ddp.sequential.config import DDPConfig
from tagi_ddp.sequential.elastic import ElasticInterface
from tagi_ddp.sequential.equality import check_structure
from tagi_ddp.sequential.files import FileInterface
from tagi_ddp.sequential.inputs import Inputs
from tagi_ddp.sequential.learning import LearnInterface
from tagi_ddp.sequential.membership import make_membership
from tagi_ddp.sequential.placement import (
    attach_replica,
    bring_together,
    require_sequential,
    threads_for,
)
from tagi_ddp.sequential.run_state import RunStateInterface
from tagi_ddp.sequential.same_rows import SameRows
from tagi_ddp.trace.timeline import traced
from tagi_ddp.update.choose import make_exchange
from tagi_ddp.update.compressed_sum import Compress
from tagi_ddp.update.exchange import Exchange, Setting
from tagi_ddp.update.merging import make_merging
from tagi_ddp.update.micro_batches import Accumulation
from tagi_ddp.update.not_finite import refusal
from tagi_ddp.update.reduction import Kind, Reduction, Rule


class DDPSequential(LearnInterface, FileInterface, RunStateInterface, ElasticInterface, Closing):
    """A pytagi Sequential as one of ``world_size`` replicas that stay equal bit for bit.

    Each rank runs forward and backward on its own share of a batch; `step` sums the deltas of all
    ranks (or takes their mean), caps them and applies the same update to every replica. With
    ``average=False`` the result is that of one process on the union of the shares. With
    ``average=True``, pytagi's default, it is the mean of the deltas, capped as for one share: steps
    are about ``world_size`` times more cautious. With ``reduction="precision"`` ranks step alone,
    and their posteriors are merged, at every step or less often; see `merge`.

    An error in any method ends the group. This rank raises it at once; the other ranks raise an
    error that names this rank, at their next collective operation.

    Args:
        model: the network, on the CPU whatever ``device`` is; trained in place. All ranks must pass
            the same layers. Rank 0's parameters and running statistics are copied to all ranks.
        config: from the launcher by `DDPConfig.from_env`; required without a ``communicator``.
        average: True: mean of the deltas; False: their sum, which reproduces one process.
        reduction: "mean" or "sum" of the deltas, instead of ``average``; or "precision": posteriors
            are merged.
        sync_every: for "precision": the number of steps between merges; with merge="agreement"
            fewer at first, 8 or an eighth of all so far. Or a SyncSchedule, by which ranks of a
            node merge often, nodes seldom and without waiting: it needs `begin_epoch`, `end_epoch`.
        node_size: for "precision": the number of consecutive ranks of a node; None: a host's ranks.
        merge: for "precision": "agreement", the default, averages what ranks have learned alike,
            and sums all else; "bayes" always sums. That is exact only if the posterior of each rank
            is: the model is linear and Gaussian, each sample depends on one weight, and no step is
            capped. It diverges on correlated inputs, even for a single Linear layer;
            docs/merging.md compares both.
        compress: for "precision": "bf16" or "int8": send changes in 16 or 8 bits, between nodes if
            there are several; what rounding drops is sent later.
        sharded: each rank caps and applies the deltas of its part of the parameters only, and all
            gather the results: the same bits with less work at each step. The ranks of one host
            always do so. Not for "precision".
        communicator: instead of ``config``: a communicator, or a torch.distributed.ProcessGroup. It
            stays open when the model is closed.
        compute: the code of forward and backward, with the same results: the "engine"; "native",
            the backend's kernels, fastest for small networks; "torch", for large ones and
            convolutions. "auto" takes what is fastest for each size of batch, and warns if only the
            engine can compute the network (docs/compute.md).
        device: of the replica and the computation, like "cuda:0"; by default the GPU of the local
            rank for NCCL, else the CPU. Reading an attribute here updates the wrapped model.
        precision: of matrix products and convolutions. "tf32" is for GPUs; "bfloat16" keeps three
            digits of each factor, and sums in float32.
        cuda_graph: True: `learn` replays, for each size of batch, one CUDA graph instead of
            queueing kernels one by one: far faster for small networks on a GPU, from tensors there.
            It warns if that is impossible.
        elastic: True: when ranks are lost the others go on, and new ones may join, with `steps`; a
            number: seconds, by default 300, after which a silent rank is lost (docs/elastic.md).

    Raises:
        ValueError, TypeError: an argument is wrong, or two exclude each other.
        BackendUnavailable, Timeout, PeerLost: the ranks could not be connected.
        ReplicaMismatch: the ranks' models differ in their layers.
    """

    def __init__(
        self,
        model: Any,
        config: DDPConfig | None = None,
        average: bool = True,
        *,
        reduction: Kind | None = None,
        sync_every: int | SyncSchedule = 1,
        node_size: int | None = None,
        sharded: bool = False,
        merge: Rule | None = None,
        compress: Compress | None = None,
        communicator: Communicator | Any | None = None,
        compute: Choice = "auto",
        device: str | None = None,
        precision: Precision = "float32",
        cuda_graph: bool = False,
        elastic: bool | float = False,
    ) -> None:
        """Connect the ranks, compare the models and copy rank 0's parameters to all."""
        self._calls = new_lock()
        self._own_communicator = communicator is None
        if reduction is None:
            reduction = "mean" if average else "sum"
        if elastic is not False:
            Reduction(reduction, sync_every, node_size, sharded, merge, compress).check_elastic()
            if device not in (None, "cpu"):
                raise ValueError(f"device cannot be {device!r} with elastic: leave it out")
            self._membership = make_membership(config, elastic)
            # This rank is alone until it is ready for a group, so that no other waits for it.
            self.communicator, device = SingleCommunicator(), "cpu"
        else:
            self.communicator, device = bring_together(config, communicator, device)
        self.model = model
        self.config = config or DDPConfig(
            [], "auto", self.communicator.rank, self.communicator.size
        )
        self._closed = False
        try:
            with self._or_abort():
                self._reduction = Reduction(
                    reduction, sync_every, node_size, sharded, merge, compress
                )
                self.reduction, self.average = self._reduction.kind, self._reduction.average
                require_sequential(model)
                self._attach(compute, device, precision)
                self._find_fast_paths(cuda_graph)
        except BaseException:
            self.close()
            raise

    def _attach(self, compute: Choice, device: str, precision: Precision) -> None:
        reduction = self._reduction
        check_sizes_of_updates()
        replica = attach_replica(self.model, device, self.communicator)
        chosen = choose(self.model, replica, compute, device, precision)
        options = {"reduction": reduction.kind, "compute": chosen, "precision": precision}
        self._options = options | reduction.options()
        schedule = reduction.sync_every
        state = {"sync_every": vars(schedule)} if isinstance(schedule, SyncSchedule) else {}
        elastic = self._membership is not None
        if not elastic:
            check_structure(self.communicator, replica, self._options | state)
        bucket = None
        if chosen != "engine" and device == "cpu":
            size = replica.parameters.size
            # The shared memory of a group ends with the group.
            bucket = replica.zeros() if elastic else host_bucket(self.communicator, size)
        kit = self.model, replica, bucket, device, precision
        self.compute = make_compute(chosen, *kit)
        if chosen == "auto" and isinstance(self.compute, NativeCompute):
            self._by_batch = ComputeByBatch(
                self.model, self.compute, partial(make_compute, "torch", *kit)
            )
        self._swaps = swaps_in_samples(self.model)
        self._inputs = Inputs(sample_shape(self.model))
        self._replica = self.compute.replica
        self._accumulation = Accumulation(self._replica)
        self._rollback = Rollback(self.model, self._by_batch or self.compute, self._replica)
        threads = threads_for(self.model, self._replica, self.communicator)
        if threads or chosen != "engine":
            self.set_threads(threads or self.model._cpp_backend.num_threads)
        if elastic:
            self._shares_cores = threads is not None
            self._begin_elastic()
            return
        if reduction.kind == "sum" and self.communicator.size > 1:
            self._same_rows = SameRows(self.communicator)
        self._replica.share(self.communicator)
        setting = Setting(
            self.communicator,
            self._replica,
            reduction.average,
            self._rollback,
            bucket,
            reduction.sharded,
        )
        self._exchange: Exchange = (
            make_merging(setting, reduction) if reduction.merges else make_exchange(setting)
        )

    # --- the engine's interface ---------------------------------------------------------------

    def __call__(
        self, mu_x: ArrayLike, var_x: ArrayLike | None = None
    ) -> tuple[FloatArray, FloatArray]:
        """Call `forward`."""
        return self.forward(mu_x, var_x)

    @one_at_a_time
    @traced("forward")
    def forward(
        self, mu_x: ArrayLike, var_x: ArrayLike | None = None
    ) -> tuple[FloatArray, FloatArray]:
        """Run the network on this rank's share of a batch.

        Args:
            mu_x: means of the inputs, [batch, inputs] or flat: of images [batch, channels, height,
                width], of series [batch, steps, inputs]. A rank without a share of this batch
                passes an empty array, and contributes nothing at `step`. Or another network's
                ``output_z_buffer``, which has variances and jacobians, too.
            var_x: their variances, of the same size, finite and not negative (not checked in
                tensors on a GPU); None: the inputs are exact.

        Returns:
            means and variances of the outputs, each flat, batch * output size floats; tensors on
            the replica's device, without a wait for it, if torch computes and ``mu_x`` is a tensor.
        """
        if self._closed:
            self._require_open()
        begins = False  # True if this begins a step that can be undone
        try:
            compute, by_batch = self.compute, self._by_batch
            keep = by_batch is not None or compute.takes_tensors
            mean, variance, shown = self._inputs.take(mu_x, var_x, keep)
            if self._misfit is not None:
                self._undo_misfit()
            if self._rollback.needed and self._accumulation.samples is None:
                self._rollback.keep()
                begins = True
            if self._same_rows is not None:
                self._same_rows.look(mean)
            if len(mean) == 0:
                self._accumulation.forwarded = 0
                return mean, mean + 0
            if by_batch is not None and mean.size != by_batch.size:
                compute = self.compute = by_batch(mean)
            if shown is None:
                outputs = compute.forward(mean, variance)
            else:
                outputs = compute.forward_from(shown)
            self._accumulation.forwarded = compute.samples
            if self._swaps:
                shared = self.communicator.size > 1 and self.reduction != "precision"
                if shared or self._accumulation.adds:
                    require_even(compute.samples)
            return outputs
        except BaseException as error:
            if begins:
                self._undo()
            self._give_up(error)
            raise

    @one_at_a_time
    @traced("backward")
    def backward(self) -> None:
        """Compute the deltas from ``input_delta_z_buffer``, which the output updater has filled.

        Deltas add up over calls under `no_sync`, and until the next `step` after it; otherwise each
        call replaces them.
        """
        if self._closed:
            self._require_open()
        try:
            if self._misfit is not None:
                raise ValueError(self._misfit[0])
            accumulation, early = self._accumulation, self._exchange.early
            if accumulation.before_backward():
                if early is not None:
                    early.discard()
                self.compute.backward(None if early is None or accumulation.adds else early.start)
            elif early is not None and not accumulation.adds:
                early.start_nothing()
            accumulation.after_backward()
        except BaseException as error:
            self._give_up(error)
            raise

    @one_at_a_time
    @traced("step")
    def step(self) -> None:
        """Exchange the deltas of all ranks and apply the same update to every replica.

        Raises NotFiniteError, on all ranks, if a delta of any rank is NaN or infinite. Parameters,
        running statistics and recurrent states are then as they were before the step's first
        `forward`. If replicas are on devices and no deltas go over the host, no rank waits for this
        check: the error is raised eight steps later, or by `check_replicas`.
        """
        if self._closed:
            self._require_open()
        try:
            samples = self._accumulation.take()
            try:
                if self._membership is None:
                    self._exchange(samples)
                else:
                    self._step_together(samples)
            except BaseException:
                self._undo()
                raise
            self._rollback.drop()
            if self._by_batch is not None:  # A merging exchange may have undone the step.
                self.compute = self._by_batch.now
            if self._same_rows is not None:
                self._compare_rows(stepped=True)
        except BaseException as error:
            self._give_up(error)
            raise

    def barrier(self) -> None:
        """Wait until every rank has called it."""
        self.communicator.barrier()

    # --- beyond the engine's interface --------------------------------------------------------

    def no_sync(self) -> AbstractContextManager[None]:
        """Add up the deltas of several micro-batches before one `step` exchanges their sum.

        ``with model.no_sync():`` forward and backward of every micro-batch; then `step`, outside.
        """
        return self._accumulation.no_sync()

    def close(self) -> None:
        """Leave the group; the model stays usable on its own. May be called again.

        Warns if a step on the device was refused and this has not been reported yet.
        """
        if self._closed:
            return
        self._closed = True
        self._at_once = self._graphs = None
        exchange: Exchange | None = getattr(self, "_exchange", None)
        if exchange is not None:
            exchange.close()
        if self._own_communicator:
            self.communicator.close()
        if exchange is not None and (ranks := exchange.take_refused(everything=True)):
            warnings.warn(refusal("a step before close() was", ranks), RuntimeWarning, stacklevel=2)

    def _or_abort(self) -> AbstractContextManager[None]:
        """Report an error in the block to the other ranks, so that none waits for this one."""
        self._require_open()
        return or_abort(self._groups())

    def _require_open(self) -> None:
        if self._closed:
            raise CommunicatorError("the model is closed; wrap it again to go on")

    def _undo(self) -> None:
        """Drop the deltas of the present step, and restore the other state that it has changed."""
        self._accumulation.discard()
        self._rollback.restore()
        if self._by_batch is not None:
            self.compute = self._by_batch.now

    def _give_up(self, error: BaseException) -> None:
        report(self._groups(), error)

    def _groups(self) -> Iterator[CanAbort]:
        yield self.communicator
        if (exchange := getattr(self, "_exchange", None)) is not None:
            yield exchange
