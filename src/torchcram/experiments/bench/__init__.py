"""Compressed models side by side: how large their files are, how good and how fast they are."""
