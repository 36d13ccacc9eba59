"""Kernels in C++, which are compiled with the package if there is a compiler."""
