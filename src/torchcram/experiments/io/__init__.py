"""Reading and writing: strict dataclasses from YAML and JSON, atomic files, locks."""
