"""From a row of logits to a token: settings, filters, counter-based random numbers, logprobs (docs/sampling.md).

Not here: running the model (worker/), stop strings and the end of a request (engine/).
"""
