"""The step of the script that this process makes, by which its launcher compares failures."""

number: int | None = None
"""The number of the step over all starts of the script; None: it is not known."""

began = False
"""True if this process has made a step together with others."""
