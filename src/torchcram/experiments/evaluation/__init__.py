"""Compressed models and their scores; results."""
