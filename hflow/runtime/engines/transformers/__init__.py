"""The transformers engine: generate and score by Hugging Face's own models, each row by itself or beside the
other samples of its prompt, for debugging and as an oracle of the other engines. Slow, and simple enough to
be read at once.
"""
