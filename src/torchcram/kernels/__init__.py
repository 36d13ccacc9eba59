"""Kernels: C++ for the CPU, Triton for CUDA."""
