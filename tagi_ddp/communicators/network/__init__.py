"""Communicators whose buffers are in host memory, over MPI or gloo."""
