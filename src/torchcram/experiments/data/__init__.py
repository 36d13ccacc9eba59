"""Datasets: images and tokenised texts, from files to batches on a device."""
