"""torch.distributed on the communicators of this package: the backend "tagi_ddp"."""
