"""Elastic jobs, whose ranks may be lost and which ranks may join.

The launcher decides by its `membership` when the ranks make another group. Ranks join that group by
a `rendezvous`, and a rank that is behind the others catches up in `job`.
"""
