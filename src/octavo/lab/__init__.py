"""The laboratory: lessons that compute something slowly, then fast, and measure what the difference is made of.

A lesson is a folder: short versions to read, `experiment.py` that measures, `lesson.md` with the theory. lessons.py lists them.
Stateless. Not here: the command line (cli/lab.py), the pages in a browser (ui/).
"""
