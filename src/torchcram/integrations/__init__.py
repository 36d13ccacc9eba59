"""CrAM in the training loops and file formats of other frameworks, imported only when used."""
