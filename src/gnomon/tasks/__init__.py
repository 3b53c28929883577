"""WHAT IS ASKED: generated, tabled and mixed tasks, their rendering, and what is held out."""
