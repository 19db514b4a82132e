"""Experiments in virtual time: the paper's figures and tables, and what lies beyond them.

Read cases.py for one simulation, lines.py for a setting under several seeds, experiment.py for what
an experiment is, registry.py for the list. document.py is the JSON; pictures.py and render.py turn
it into PNG, Markdown and HTML.
"""
