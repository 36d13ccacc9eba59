"""CrAM in the training loops of other frameworks, which are imported only when used."""
