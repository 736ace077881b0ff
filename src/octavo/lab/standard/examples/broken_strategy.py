"""A KV cache with a mistake, to see one caught: every token after the first is put one position too low.

    octavo lab run standard --strategy broken_strategy.py

The text still reads well for a while, which is what makes such mistakes live long.
"""


def generate(model, prompt_ids, max_tokens):
    cache = model.new_cache()
    answer = [int(model.forward(prompt_ids, cache)[-1].argmax())]
    while len(answer) < max_tokens:
        position = len(prompt_ids) + len(answer) - 2  # should be - 1: the newest token overwrites the one before it
        answer.append(int(model.forward([answer[-1]], cache, position=position)[-1].argmax()))
    return answer
