"""Turns the crank: the loop, the border around it, and the front ends before it."""
