"""Evaluate a frozen encoder: features, probes and maps, as functions of tensors and on run directories."""
