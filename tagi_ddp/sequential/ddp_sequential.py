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
from tagi_ddp.sequential.elastic import ElasticInterface, check_elastic
from tagi_ddp.sequential.equality import check_structure
from tagi_ddp.sequential.files import FileInterface
from tagi_ddp.sequential.inputs import Inputs
from tagi_ddp.sequential.learning import LearnInterface
from tagi_ddp.sequential.membership import make_membership
from tagi_ddp.sequential.placement import (
    bring_together,
    place,
    require_sequential,
    threads_for,
)
from tagi_ddp.sequential.run_state import RunStateInterface
from tagi_ddp.sequential.same_rows import SameRows
from tagi_ddp.trace.timeline import traced
from tagi_ddp.update.choose import make_exchange
from tagi_ddp.update.compressed_sum import Compress
from tagi_ddp.update.exchange import Exchange, Setting
from tagi_ddp.update.merging import (
    Reduction,
    Rule,
    Scheme,
    check_reduction,
    make_merging,
    make_scheme,
)
from tagi_ddp.update.micro_batches import Accumulation
from tagi_ddp.update.not_finite import refusal


class DDPSequential(LearnInterface, FileInterface, RunStateInterface, ElasticInterface, Closing):
    """A pytagi Sequential as one of ``world_size`` replicas that stay equal bit for bit.

    Each rank runs forward and backward on its own share of a batch; `step` sums the deltas of all
    ranks (or takes their mean), caps them and applies the same update everywhere. With
    ``average=False`` the result is that of one process on the union of the shares; with
    ``average=True``, pytagi's default, it is the mean of the deltas, capped as for one share: steps
    about ``world_size`` times more cautious. With ``reduction="precision"`` ranks step alone, and
    their posteriors are merged, at every step or less often; see `merge`.

    An error in any method ends the group: it is raised here at once, and on the other ranks, naming
    this one, at their next collective operation.

    Args:
        model: the network. It is trained in place; all ranks must give the same layers. Parameters
            and running statistics of rank 0 win. On the CPU, wherever ``device`` is.
        config: `DDPConfig.from_env` asks the launcher; required without a ``communicator``.
        average: True: mean of the deltas; False: their sum, which reproduces one process.
        reduction: "mean" or "sum" of the deltas, in place of ``average``; or "precision", by which
            posteriors are merged.
        sync_every: for "precision": after how many steps ranks merge; by "agreement" sooner at
            first, after 8 or an eighth of all so far. Or a SyncSchedule, by which ranks of a node
            merge often, nodes seldom and without waiting: it needs `begin_epoch`, `end_epoch`.
        node_size: for "precision": how many consecutive ranks make a node; None: those of a host.
        merge: for "precision": "agreement", the default, averages where ranks have learned alike,
            and sums where not; "bayes" sums all. That is exact only if the posterior of each rank
            is: the model is linear and Gaussian, each sample looks at one weight, and no step is
            capped. It diverges on correlated inputs, a single Linear layer's, too; docs/merging.md
            compares them.
        compress: for "precision": "bf16" or "int8" let changes travel in 16 or 8 bits, between
            nodes if there are several; what rounding drops is sent later.
        sharded: each rank caps and applies the deltas of its part of the parameters only, and all
            take the results: the same bits with less work at each step. Not for "precision".
        communicator: takes the place of ``config``: a communicator, or a
            torch.distributed.ProcessGroup. It stays open when the model is closed.
        compute: who runs forward and backward, with the same results: the "engine"; "native", the
            backend's kernels, fastest for small networks; "torch", for large ones and convolutions.
            "auto" takes what is fastest for each size of batch, and warns where only the engine can
            (docs/compute.md).
        device: where it is computed and the replica lives, like "cuda:0"; by default the GPU of
            the local rank for NCCL, else the CPU. Reading through this updates the wrapped model.
        precision: of matrix products and convolutions. "tf32" is for GPUs; "bfloat16" keeps three
            digits of each factor, and sums in float32.
        cuda_graph: whether `learn` replays, for each size of batch, one CUDA graph instead of
            queueing kernels one by one: far faster for small networks on a GPU, from tensors there.
            It warns where there is none.
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
        reduction: Reduction | None = None,
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
        """Bring the ranks together, compare the models and copy rank 0's parameters to all."""
        self._calls = new_lock()
        self._own_communicator = communicator is None
        if elastic is not False:
            check_elastic(sync_every, node_size, sharded, device)
            self._membership = make_membership(config, elastic)
            # Alone until all is there that it needs in a group, so that nobody waits for it.
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
                self.reduction = check_reduction(
                    reduction, bool(average), sync_every, node_size, sharded
                )
                self.average = self.reduction == "mean"
                require_sequential(model)
                scheme = make_scheme(self.reduction, node_size, merge, compress)
                self._attach(compute, device, precision, sync_every, scheme, sharded)
                self._find_shorter_ways(cuda_graph)
        except BaseException:
            self.close()
            raise

    def _attach(
        self,
        compute: Choice,
        device: str,
        precision: Precision,
        sync_every: int | SyncSchedule,
        scheme: Scheme,
        sharded: bool,
    ) -> None:
        check_sizes_of_updates()
        replica = place(self.model, device, self.communicator)
        chosen = choose(self.model, replica, compute, device, precision)
        times = sync_every.settings if isinstance(sync_every, SyncSchedule) else sync_every
        self._options = {
            "reduction": self.reduction,
            "compute": chosen,
            "precision": precision,
            "sync_every": times,
            "sharded": sharded,
            "merge": scheme.rule,
            "compress": scheme.compress,
        }
        schedule = {"sync_every": vars(sync_every)} if times is not sync_every else {}
        elastic = self._membership is not None
        if not elastic:
            check_structure(self.communicator, replica, {**self._options, **schedule})
        bucket = None
        if chosen != "engine" and device == "cpu":
            size = replica.parameters.size
            # What the ranks of one group share is gone with the group.
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
            assert not isinstance(sync_every, SyncSchedule)  # `check_elastic`
            self._begin_elastic(scheme, sync_every)
            return
        if self.reduction == "sum" and self.communicator.size > 1:
            self._same_rows = SameRows(self.communicator)
        self._replica.share(self.communicator)
        setting = Setting(
            self.communicator, self._replica, self.average, self._rollback, bucket, sharded
        )
        self._exchange: Exchange = (
            make_merging(setting, scheme, sync_every)
            if self.reduction == "precision"
            else make_exchange(setting)
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
            var_x: their variances, of the same size, finite and not negative (in tensors on a GPU
                nothing looks at them); None: the inputs are exact.

        Returns:
            means and variances of the outputs, each flat, batch * output size floats; tensors on
            the replica's device if torch computes and ``mu_x`` is a tensor, which needs no waiting
            for the device.
        """
        if self._closed:
            self._require_open()
        begins = False  # whether it begins a step that can be undone
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
            if self._alone is not None:  # micro-batches may be ranks' shares themselves
                self._alone.by_shares = not self._accumulation.adds
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

        Under `no_sync`, and until the next `step` after it, they add up over calls; otherwise a
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

        Raises NotFiniteError, on all ranks, if a delta of any rank is NaN or infinite. The whole
        state then is as it was before the step's first `forward`: parameters, running statistics,
        recurrent states. Where the replicas live on devices and no deltas go over the host, nobody
        waits to learn that: it is raised eight steps later, or by `check_replicas`.
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
            if self._by_batch is not None:  # where posteriors are merged, the exchange may undo
                self.compute = self._by_batch.now
            if self._same_rows is not None:
                self._compare_rows(stepped=True)
        except BaseException as error:
            self._give_up(error)
            raise

    def barrier(self) -> None:
        """Return once every rank has called it."""
        self.communicator.barrier()

    # --- beyond the engine's interface --------------------------------------------------------

    def no_sync(self) -> AbstractContextManager[None]:
        """Add up the deltas of several micro-batches before one `step` exchanges their sum.

        ``with model.no_sync():`` forward and backward of every micro-batch; then `step`, outside.
        """
        return self._accumulation.no_sync()

    def close(self) -> None:
        """Leave the group; the model stays usable on its own. May be called again.

        Warns of a step on the device that was refused and of which nobody has been told yet.
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
        """Let the other ranks know when this one fails, so that none waits for it."""
        self._require_open()
        return or_abort(self._groups())

    def _require_open(self) -> None:
        if self._closed:
            raise CommunicatorError("the model is closed; wrap it again to go on")

    def _undo(self) -> None:
        """Put back what the step that begins or ends here has changed beside deltas."""
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
