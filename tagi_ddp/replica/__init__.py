"""The state of one network, on the host or on a device: parameters, deltas, running statistics."""
