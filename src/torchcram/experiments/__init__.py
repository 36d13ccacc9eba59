"""Everything that is not the method: data, models, training loops, results."""
