"""Ranks with a CUDA device each, over NCCL."""

from tagi_ddp.communicators.nccl.communicator import NcclCommunicator, create
from tagi_ddp.communicators.nccl.libraries import NcclMissing, local_device
from tagi_ddp.communicators.nccl.work import NcclWork

__all__ = ["NcclCommunicator", "NcclMissing", "NcclWork", "create", "local_device"]
