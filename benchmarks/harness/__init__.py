"""Measurements of rows: in turn, in the same run, on the same work."""
