"""WHAT MAY BE CONCLUDED from runs."""
