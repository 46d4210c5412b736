"""Workloads, the static-batching baseline and measurements. The room drives engines; it does not know their insides."""
