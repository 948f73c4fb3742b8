"""The command ``tagi-ddp``."""
