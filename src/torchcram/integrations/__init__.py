"""CrAM inside the training loops of other frameworks, each imported where it is used."""
