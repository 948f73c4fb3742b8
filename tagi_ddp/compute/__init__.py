"""Forward and backward of a replica, by the engine's kernels, the backend's, or torch's."""
