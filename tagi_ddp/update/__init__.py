"""The work of `step`: exchange, cap and apply the deltas of all ranks, or merge posteriors."""
