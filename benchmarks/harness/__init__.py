"""How rows are measured: in turn, in the same run, on the same work."""
