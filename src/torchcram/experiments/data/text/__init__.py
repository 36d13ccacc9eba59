"""Language tasks: question answering by spans, and classification of sentences."""
