"""The cases of benchmarks/fuzz.py."""
