"""Metrics, timeline and request ledger, as observers. The room knows moments and times, not how steps come about."""
