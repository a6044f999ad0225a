"""The frozen encoder: features, probes, maps; as functions of tensors, and over run directories."""
