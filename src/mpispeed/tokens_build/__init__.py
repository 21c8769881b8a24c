"""Floor 6, tokens_build: token stores made from texts and from files of tokens, by all ranks of a job.

Knows files, tokenizers, the format of `tokens`, and a Comm that is handed to it. Must not know the engine or the
configuration.
"""
