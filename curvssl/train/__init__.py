"""Pretraining: the loop, one step of it, and the metrics measured meanwhile."""
