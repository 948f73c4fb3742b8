"""When replicas synchronize: every batch, or now and then between nodes."""

from tagi_ddp.optim.schedule import Skips, Sync, SyncSchedule

__all__ = ["Skips", "Sync", "SyncSchedule"]
