"""Kernels of our own: C++ for the CPU, Triton for CUDA."""
