"""Benchmarks of compressed models: accuracy, file sizes and speed, side by side."""
