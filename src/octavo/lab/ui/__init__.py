"""The lab in a browser: a chat that shows its probabilities, a map of the KV blocks, a race of decoding strategies.

A Streamlit app on the loopback, on the real engine. Not here: the lessons themselves (octavo.lab.standard, ...).
"""
