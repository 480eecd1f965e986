"""Looking into an artifact: its stages, their graphs by layer, what differs, memory over time, a page.

What a stage's text is parsed for imports sympy; `stages` and `summary` need the runtime alone.
"""
