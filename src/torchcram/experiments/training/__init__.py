"""Training with a recipe: the trainer, its steps, the folder of a run."""
