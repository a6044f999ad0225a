"""Pretraining: the loop, one step of it, and what is watched meanwhile."""
