"""What a model can do: bits per byte, CORE, cloze questions from the text, exact match."""
