"""The command line: one file per command over the public API.

main.py turns errors into one line and an exit code; app.py picks the command; options.py derives flags from the dataclasses;
terminal.py writes text to whatever standard output is; loading_bar.py shows how far loading is. Each command's module is
imported only when it is called.
Not here: anything a Python caller might want too (llm.py), what a setting means (config_sources.py).
"""
