"""Kernels for CPUs in C++, compiled at installation if there is a compiler, and loaded by `library`."""
