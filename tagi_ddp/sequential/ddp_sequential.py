"""DDPSequential: one pytagi network, trained by many processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import numpy.typing as npt
from numpy.typing import ArrayLike

from tagi_ddp.communicators import Communicator
from tagi_ddp.communicators.config import DDPConfig
from tagi_ddp.communicators.guard import Closing
from tagi_ddp.communicators.single import SingleCommunicator
from tagi_ddp.compute.choose import choose
from tagi_ddp.compute.computes import Computes
from tagi_ddp.compute.interface import Choice, Precision
from tagi_ddp.compute.local_network import LocalNetwork
from tagi_ddp.compute.sorted_labels import SortedLabels
from tagi_ddp.data import DistributedSampler
from tagi_ddp.elastic.job import ElasticJob, GroupChange
from tagi_ddp.elastic.rendezvous import Rendezvous, make_rendezvous
from tagi_ddp.engine.buffers import FloatArray
from tagi_ddp.engine.locks import one_at_a_time
from tagi_ddp.engine.output_updater import check_sizes_of_updates
from tagi_ddp.optim.schedule import SyncSchedule
from tagi_ddp.replica.equality import check_structure
from tagi_ddp.replica.staging import host_bucket
from tagi_ddp.sequential.files import ParameterFiles
from tagi_ddp.sequential.first_step import FirstStep
from tagi_ddp.sequential.interface import SequentialInterface
from tagi_ddp.sequential.merges import Merges
from tagi_ddp.sequential.placement import (
    attach_replica,
    bring_together,
    require_sequential,
    threads_for,
)
from tagi_ddp.sequential.run_state import Entries, RunState
from tagi_ddp.sequential.training import Training, one_of
from tagi_ddp.update.choose import make_exchange
from tagi_ddp.update.compressed_sum import Compress
from tagi_ddp.update.exchange import Setting
from tagi_ddp.update.merging import make_merging
from tagi_ddp.update.ranks import Ranks
from tagi_ddp.update.reduction import Kind, Reduction, Rule

T = TypeVar("T")


class DDPSequential(SequentialInterface, Closing):
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
            number: seconds after which a silent rank is lost, by default the timeout of
            ``config`` (docs/elastic.md).
        cap_factor: a step moves a mean or a variance by at most the standard deviation divided by
            this number; 0: without a limit. None: the engine's factor, which depends on the batch
            (docs/training.md).

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
        cap_factor: float | None = None,
    ) -> None:
        """Connect the ranks, compare the models and copy rank 0's parameters to all."""
        own = communicator is None
        rendezvous: Rendezvous | None = None
        if reduction is None:
            reduction = "mean" if average else "sum"
        arguments = reduction, sync_every, node_size, sharded, merge, compress, cap_factor
        if elastic is not False:
            Reduction(*arguments).check_elastic()
            if device not in (None, "cpu"):
                raise ValueError(f"device cannot be {device!r} with elastic: leave it out")
            rendezvous = make_rendezvous(config, elastic)
            # This rank is alone until it is ready for a group, so that no other waits for it.
            communicator, device = SingleCommunicator(), "cpu"
        else:
            communicator, device = bring_together(config, communicator, device)
        self._ranks = Ranks(communicator, own)
        self._elastic: ElasticJob | None = None
        self._config = config or DDPConfig([], "auto", communicator.rank, communicator.size)
        try:
            with self._ranks.or_abort():
                self._reduction = Reduction(*arguments)
                require_sequential(model)
                self._assemble(model, rendezvous, compute, device, precision, cuda_graph)
        except BaseException:
            self.close()
            raise

    def _assemble(
        self,
        model: Any,
        rendezvous: Rendezvous | None,
        compute: Choice,
        device: str,
        precision: Precision,
        cuda_graph: bool,
    ) -> None:
        """Make the parts, with all ranks."""
        reduction, ranks = self._reduction, self._ranks
        communicator = ranks.communicator
        check_sizes_of_updates()
        replica = attach_replica(model, device, communicator)
        replica.on_host.chosen_cap_factor = reduction.cap_factor
        chosen = choose(model, replica, compute, device, precision)
        options = {"compute": chosen, "precision": precision, **reduction.options()}
        if rendezvous is None:
            check_structure(communicator, replica, options | reduction.state())
        size = replica.parameters.size
        # The shared memory of a group ends with the group.
        make_bucket = replica.zeros if rendezvous else partial(host_bucket, communicator, size)
        computes = Computes(model, replica, make_bucket, chosen, device, precision)
        local = LocalNetwork(model, computes)
        local.labels = SortedLabels() if self._config.rank == 0 else None
        super().__init__(local)
        threads, shares_cores = threads_for(model, local.replica, communicator)
        if threads:
            computes.set_threads(threads)
        first = None
        self._run_state = RunState(local, ranks, options)
        self._files = ParameterFiles(model, local.replica, ranks)
        if rendezvous is None:
            if communicator.size > 1:
                first = FirstStep(communicator, reduction.kind == "sum")
            local.replica.share(communicator)
            setting = Setting(
                communicator,
                local.replica,
                reduction.average,
                local.rollback,
                computes.bucket,
                reduction.sharded,
            )
            if reduction.merges:
                # Ranks may make different numbers of steps before the first merge.
                compare = None if first is None else partial(first.compare, steps=True)
                ranks.exchange = make_merging(setting, reduction, compare)
                first = None
            else:
                ranks.exchange = make_exchange(setting)
        else:
            self._elastic = ElasticJob(
                local,
                ranks,
                reduction,
                options,
                rendezvous,
                self._config,
                shares_cores,
                self.merge,
            )
        self._merges = Merges(ranks, local.replica, self._elastic)
        self._training = Training(local, ranks, reduction.merges, first, self._elastic, cuda_graph)

    @property
    def communicator(self) -> Communicator:
        """The communicator of all ranks; in an elastic job, that of the present group."""
        return self._ranks.communicator

    @property
    def config(self) -> DDPConfig:
        """The settings of this rank; in an elastic job, in the present group."""
        return self._config if self._elastic is None else self._elastic.config

    @property
    def reduction(self) -> Kind:
        """The reduction in use: "sum", "mean" or "precision"."""
        return self._reduction.kind

    @property
    def average(self) -> bool:
        """True if the deltas of all ranks are averaged."""
        return self._reduction.average

    # Training.

    def __call__(
        self, mu_x: ArrayLike, var_x: ArrayLike | None = None
    ) -> tuple[FloatArray, FloatArray]:
        """Call `forward`."""
        return self.forward(mu_x, var_x)

    @one_at_a_time
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
        return self._training.forward(mu_x, var_x)

    @one_at_a_time
    def backward(self) -> None:
        """Compute the deltas from ``input_delta_z_buffer``, which the output updater has filled.

        Deltas add up over calls under `no_sync`, and until the next `step` after it; otherwise each
        call replaces them.
        """
        self._training.backward()

    @one_at_a_time
    def step(self) -> None:
        """Exchange the deltas of all ranks and apply the same update to every replica.

        Raises NotFiniteError, on all ranks, if a delta of any rank is NaN or infinite. Parameters,
        running statistics and recurrent states are then as they were before the step's first
        `forward`. If replicas are on devices and no deltas go over the host, no rank waits for this
        check: the error is raised eight steps later, or by `check_replicas`.
        """
        self._training.step()

    @one_at_a_time
    def learn(
        self,
        mu_x: ArrayLike | None = None,
        mu_obs: ArrayLike | None = None,
        var_obs: ArrayLike | None = None,
        selected_idx: ArrayLike | None = None,
        var_x: ArrayLike | None = None,
        *,
        x: ArrayLike | None = None,
        y: ArrayLike | None = None,
        noise: ArrayLike | None = None,
    ) -> tuple[FloatArray, FloatArray]:
        """Train on this rank's share of a batch: forward, output update, backward and step.

        ``x``, ``y`` and ``noise`` are other names of ``mu_x``, ``mu_obs`` and ``var_obs``.

        Args:
            mu_x: the inputs, [batch, inputs] or flat, as for `forward`. Required, by either name.
            mu_obs: the observations, [batch, outputs] or flat: a float for each output, for each of
                ``selected_idx``, or, without ``var_obs``, for each two outputs. NaN: no
                observation. Required, by either name.
            var_obs: the variances of the observations' noise, of the same size, or one number for
                all; finite and not negative for each observation (not checked in tensors on a GPU).
                None: the network ends in EvenExp, and every second output is the expected variance
                of the noise of the one before.
            selected_idx: the numbers of the observed outputs, counted from 1, equally many for each
                sample, as for hierarchical softmax; None: all.
            var_x: the variances of the inputs, of the same size; None: the inputs are exact.

        Returns:
            the outputs of `forward`: the predictions before the step. `get_input_states` may have
            no values after it.

        Raises:
            ValueError: rows, sizes or variances do not fit; the text names the argument.
            TypeError: an argument is missing, has another type, or was passed by both names.
            NotFiniteError: on all ranks, with nothing learned: a delta is NaN or infinite.
            Timeout, PeerLost, Mismatch: ranks were late, are lost, or called something else.
        """
        if mu_x is None or mu_obs is None or not (x is y is noise is None):
            try:
                mu_x = one_of("mu_x", mu_x, "x", x)
                mu_obs = one_of("mu_obs", mu_obs, "y", y)
                var_obs = one_of("var_obs", var_obs, "noise", noise)
            except TypeError:
                with self._ranks.or_abort():
                    raise
        assert mu_x is not None
        assert mu_obs is not None
        return self._training.learn(mu_x, mu_obs, var_obs, selected_idx, var_x)

    @one_at_a_time
    def predict(
        self, x: ArrayLike, noise: ArrayLike | None = None
    ) -> tuple[FloatArray, FloatArray]:
        """Predict any number of samples in evaluation mode, and restore the mode.

        Not a collective call: each rank predicts its own samples. Layers that remember a series
        continue it, as in `forward`, if ``x`` is a single sample.

        Args:
            x: the inputs, flat or not, samples * input size numbers.
            noise: the variance of the observations' noise, which is added to the predictions': a
                number, one for each output, or an array of [samples, outputs]. None: the learned
                noise if the network ends in EvenExp, else none. 0: no noise, only the uncertainty
                of the network itself.

        Returns:
            means and variances, float32 arrays of [samples, outputs], also for a single output. If
            the network ends in EvenExp, every second output is the noise of the one before and is
            left out, so there are half as many.

        Raises:
            ValueError: ``x`` has no whole samples, or ``noise`` is negative or of another shape.
        """
        return self._training.predict(x, noise)

    def join(self) -> AbstractContextManager[None]:
        """Allow ranks to run out of batches at different times.

        All ranks run their steps inside ``with model.join():``. A rank that leaves the block early
        follows the others' updates, without deltas of its own, until all have left. No other
        collective operation is allowed in the block.

        Raises NotFiniteError, as `step` does on all ranks; to continue like the others, a rank then
        enters another, empty block. Raises RuntimeError in an elastic job, whose ranks run out of
        batches together: `steps`.
        """
        return self._training.join()

    def no_sync(self) -> AbstractContextManager[None]:
        """Add up the deltas of several micro-batches before one `step` exchanges their sum.

        ``with model.no_sync():`` forward and backward of every micro-batch; then `step`, outside.
        """
        return self._local.accumulation.no_sync()

    def barrier(self) -> None:
        """Wait until every rank has called it."""
        self.communicator.barrier()

    # Merges, for ``reduction="precision"``, and counters.

    @one_at_a_time
    def merge(self) -> None:
        """Merge the posteriors of all ranks now; a collective call, for ``reduction="precision"``.

        With the precisions l = 1 / variance and the prior (mu0, l0) that all R ranks had after the
        last merge, the result is::

            l = l0 + sum (l_r - l0) / (1 + (R - 1) c_l)
            mu = mu0 + sum l_r (mu_r - mu0) / (1 + (R - 1) c_w) / l

        With merge="bayes", c_l and c_w are 0. With merge="agreement" they are between 0 and 1, and
        higher if ranks have learned more alike; sums that overshoot are damped (docs/merging.md).

        No sample counts twice, however many steps lie between two merges. A parameter whose
        precision would fall below a tenth takes half of the merge, or a quarter, and so on;
        `get_partial_merge_counter` counts these.

        Raises NotFiniteError on all ranks if a step of any was refused since the last merge.
        """
        self._merges.merge()

    def local_batches(self, share: Any, size: int) -> Iterator[Any]:
        """Yield the parts of this rank's share of a batch, each for a step of its own.

        ``for part in model.local_batches(share, 32): model.learn(x[part], y[part], noise)``.
        ``sync_every`` and a schedule count the whole share as one step. Several small steps between
        two merges let a large global batch keep the quality of small ones.

        Args:
            share: a sequence, like the indices from `DistributedSampler`; its length may differ
                between ranks.
            size: the length of the parts; the last one may be shorter.

        Raises:
            RuntimeError: posteriors are not merged: it needs ``reduction="precision"``.
            TypeError, ValueError: ``size`` is no integer of 1 or more.
        """
        return self._merges.local_batches(share, size)

    @one_at_a_time
    def begin_epoch(self, batches: int) -> None:
        """Begin an epoch of the schedule with this many steps, the same number on all ranks."""
        self._merges.begin_epoch(batches)

    @one_at_a_time
    def end_epoch(self, loss: float) -> float:
        """Merge the remaining steps, give the schedule the ranks' mean loss, and return that mean.

        A collective call. Raises ValueError on all ranks if a loss is NaN or infinite.
        """
        return self._merges.end_epoch(loss)

    @property
    def unmerged_steps(self) -> int:
        """The number of steps since the ranks were equal; 0 if each step makes them equal."""
        return self._ranks.exchange.steps

    def get_partial_merge_counter(self) -> dict[str, int]:
        """Return how many parameters of each layer have taken only a part of a merge so far.

        The keys are the engine's descriptions of the layers, as in `get_neg_var_w_counter`.
        """
        return self._merges.partial_counts()

    def get_merge_agreement(self) -> dict[str, float]:
        """Return by layer how much alike ranks, or nodes, had learned before the last merge.

        It is from 0, orthogonal changes, to 1, equal ones; 0 with merge="bayes". The keys are the
        engine's descriptions of the layers; layers with the same one have their mean.
        """
        return self._merges.agreement()

    def get_neg_var_w_counter(self) -> dict[str, int]:
        """Return how many variances of each layer's weights the last step found not positive.

        The keys are the engine's descriptions of the layers, as in pytagi, also inside of blocks;
        layers with the same one are added up.
        """
        return self._merges.negative_variances()

    # Files and states.

    @one_at_a_time
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the parameters that rank 0 passes, and copy them to all ranks; a collective call.

        Running statistics are loaded, too, if ``state_dict`` is the result of `state_dict`; else
        they stay, and a warning names their layers. Raises ValueError, on all ranks and before a
        parameter changes, if rank 0's do not fit.
        """
        self._files.load_state_dict(state_dict)

    @one_at_a_time
    def save(self, filename: str) -> None:
        """Write the parameters and running statistics to a file, on rank 0; others do nothing.

        The file has the engine's format, and is replaced as a whole or not at all; OSError if not.
        If posteriors are merged, call `merge` on all ranks before; this warns of unmerged steps.
        """
        self._files.save(filename)

    @one_at_a_time
    def load(self, filename: str) -> None:
        """Load a file of `save`, or of the engine; a collective call: rank 0 reads, others receive.

        Raises ParameterFileError on all ranks, before a parameter changes; rank 0 may raise an
        OSError of its own instead.
        """
        self._files.load(filename)

    @one_at_a_time
    def load_csv(self, filename: str) -> None:
        """Load a file of pytagi's ``save_csv``; a collective call, like `load`."""
        self._files.load_csv(filename)

    def params_from(self, other: Any) -> None:
        """Copy the parameters and running statistics of another network; a collective call.

        ``other`` is a DDPSequential or a pytagi Sequential. Raises as `load_state_dict` does.
        """
        self.load_state_dict(other.state_dict())

    @one_at_a_time
    def check_replicas(self) -> str:
        """Return a hash of all parameters and running statistics, which is equal on all ranks.

        A collective call. Raises ReplicaMismatch, on all ranks, if replicas differ in a single bit,
        naming the first layer that differs; and NotFiniteError, on all ranks, if a step on the
        device was refused and this has not been reported yet.
        """
        return self._run_state.check_replicas()

    @one_at_a_time
    def run_state(self) -> dict[str, Any]:
        """Return the state of the training for `load_run_state`; a collective call.

        It is nested dicts, lists, numbers and numpy's arrays. These are views: write or copy them
        before any other call. Unless posteriors are merged, only rank 0 has what is equal on all
        ranks. `tagi_ddp.checkpoint` writes it to files.

        It has nothing that lasts only for a part of a step, or of a series: call it after `step`,
        and, if layers smooth, after `smoother`.

        Raises RuntimeError, on all ranks, after a `backward` that no `step` has followed, and
        within `no_sync` and `local_batches`.
        """
        return self._run_state.run_state()

    @one_at_a_time
    def load_run_state(self, entry: Entries, ranks: int) -> None:
        """Continue from the `run_state` of ``ranks`` ranks; a collective call.

        With as many ranks, and the same reduction, training continues bit for bit. Else rank 0
        merges the ranks' posteriors, as their next merge would have, and all begin with that; LSTM
        states are shared out anew, in the ranks' order.

        Args:
            entry: ``entry(rank, name)`` returns an entry of the state of rank number ``rank``.
            ranks: the number of ranks that were saved.

        Raises ValueError, on all ranks and before anything is changed, if the network is another
        one; and what ``entry`` raises.
        """
        self.check_run_state(entry, ranks)()

    def check_run_state(self, entry: Entries, ranks: int) -> Callable[[], None]:
        """Check all that `load_run_state` checks; return a function that loads the state."""
        return self._run_state.check_run_state(entry, ranks)

    # Elastic jobs.

    @property
    def elastic(self) -> bool:
        """True if the job continues when ranks are lost."""
        return self._elastic is not None

    @property
    def changes(self) -> list[GroupChange]:
        """The changes of the group so far, in an elastic job."""
        return [] if self._elastic is None else self._elastic.changes

    @property
    def steps_made(self) -> int:
        """The number of steps of all ranks in an elastic job; also the number of the next step."""
        return self._elastic_job("steps_made").steps_made

    @property
    def joined(self) -> bool:
        """True if this rank joined an elastic job that others had begun."""
        return self._elastic is not None and self._elastic.joined

    def steps(
        self, sampler: DistributedSampler, global_batch_size: int, epochs: int, first: int = 0
    ) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Yield (step, share) for each step of an elastic job, as `DistributedSampler.steps` does.

        ``for step, share in model.steps(sampler, 256, epochs=10):`` call `step`, or `learn`, once
        on the share. If a rank is lost before a step is made, the step is repeated with shares of
        other sizes. A rank that joins begins at the step of the others. The loop ends when all
        ranks have ended theirs, with their posteriors merged.

        Args:
            sampler: the same on all ranks; its rank and number of replicas follow the group's.
            global_batch_size, epochs, first: as for `DistributedSampler.steps`.

        Raises:
            RuntimeError: the model is not elastic, or a turn of the loop made no step, or several.
        """
        return self._elastic_job("steps").steps(sampler, global_batch_size, epochs, first)

    def regroup(self, lost: Sequence[int] = ()) -> None:
        """Make a group of the remaining ranks; `step` of an elastic job does so by itself.

        It is for collective calls of the script's own: if one raises PeerLost or Timeout, call this
        with the error's ``ranks``. All remaining ranks must call this, or `step`. New ranks do not
        join here, because their scripts are elsewhere.
        """
        self._elastic_job("regroup").regroup(lost)

    def survive(self, call: Callable[[], T], changes: bool = False) -> T | None:
        """Make a collective call; if a rank is lost meanwhile, repeat it in the next group.

        Args:
            call: calls operations of `communicator`, the same on all ranks.
            changes: True if it changes the network, so that others may not copy this rank's state
                before it returns.

        Returns:
            the result of ``call``; None, without the call, if the last step is repeated, or if
            other ranks are ahead: they have completed the call, or are after another step.

        Raises:
            RuntimeError: the model is not elastic.
            PeerLost: the job has ended.
        """
        return self._elastic_job("survive").survive(call, changes)

    def saves(self, step: int) -> bool:
        """Return whether the ranks save after ``step`` steps; not if the last one is repeated.

        Raises ValueError if another number of steps has been made.
        """
        return self._elastic_job("saves").saves(step)

    def _elastic_job(self, name: str) -> ElasticJob:
        if self._elastic is None:
            raise RuntimeError(f"{name} needs DDPSequential(..., elastic=True)")
        return self._elastic

    # The end.

    def close(self) -> None:
        """Leave the group; the model stays usable on its own. May be called again.

        Warns if a step on the device was refused and this has not been reported yet.
        """
        if hasattr(self, "_training"):
            self._training.close()
        self._ranks.close()

    def _give_up(self, error: BaseException) -> None:
        self._ranks.give_up(error)
