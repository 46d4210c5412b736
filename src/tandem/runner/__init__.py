"""A plan on a device: slots, streams, carry, graphs."""
