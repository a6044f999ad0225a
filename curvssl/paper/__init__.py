"""Reproduction of the paper's table and figures."""
