"""Built-in sources that need no download: a small world in text and conversations, and words to spell."""
