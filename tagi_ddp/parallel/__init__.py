"""torch on the package's communicators: importing this registers the backend "tagi_ddp"."""

from tagi_ddp.parallel.backend import register
from tagi_ddp.parallel.process_group import ProcessGroup

register()

__all__ = ["ProcessGroup"]
