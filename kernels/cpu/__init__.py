"""Attention for CPUs in C++: compiled when the package is installed, if there is a compiler, and found by `library`."""
