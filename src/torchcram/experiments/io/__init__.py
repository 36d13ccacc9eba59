"""Strict dataclasses from YAML and JSON, atomic files, locks."""
