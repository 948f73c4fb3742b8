"""What `step` does with the deltas of all ranks: exchange, cap, apply; or merge posteriors."""
