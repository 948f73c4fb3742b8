"""Train pytagi networks on many processes, GPUs and machines."""
