"""Text to token ids and back, and the chat templates in between.

Owner of all state: one Tokenizer and one ChatTemplate per model, both unchanged after construction.
Not here: streaming (engine/detokenizer.py), stop strings (engine/stop.py), finding the files (loading/).
"""
