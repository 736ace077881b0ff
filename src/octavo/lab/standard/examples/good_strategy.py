"""A decoding strategy that keeps the greedy text: prompt lookup (Saxena 2023), speculation without a second model.

    octavo lab run standard --strategy good_strategy.py

If the last two tokens appeared before, guess that what followed them then follows again, and compute the guesses in one
step. Greedy decoding accepts a guess exactly where the model would have chosen it, so the text cannot change; a step that
computes five rows costs little more than a step of one, since both read all weights once.
"""

GUESSES = 4
NGRAM = 2


def generate(model, prompt_ids, max_tokens):
    ids = list(prompt_ids)
    cache = model.new_cache()
    ids.append(int(model.forward(ids, cache)[-1].argmax()))
    end = len(prompt_ids) + max_tokens
    while len(ids) < end:
        new = [ids[-1], *look_up(ids)][: end - len(ids)]
        # the newest token and the guesses go where the newest token belongs; wrong guesses are overwritten next time
        logits = model.forward(new, cache, position=len(ids) - 1, last=len(new))
        for row, chosen in enumerate(logits.argmax(axis=-1)):
            ids.append(int(chosen))
            if row + 1 == len(new) or new[row + 1] != chosen:
                break  # the guess after this row was wrong: what was computed for it is worthless
    return ids[len(prompt_ids) :]


def look_up(ids):
    """What followed the most recent earlier occurrence of the last NGRAM tokens."""
    last = ids[-NGRAM:]
    for start in range(len(ids) - NGRAM - 1, -1, -1):
        if ids[start : start + NGRAM] == last:
            return ids[start + NGRAM : start + NGRAM + GUESSES]
    return []
