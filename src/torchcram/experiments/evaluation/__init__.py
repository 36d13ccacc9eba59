"""Compresses trained models, scores them, and reads and writes the results."""
