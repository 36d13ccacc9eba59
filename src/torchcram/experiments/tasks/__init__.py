"""Tasks: models, batches, loss and metric of one kind of problem each."""
