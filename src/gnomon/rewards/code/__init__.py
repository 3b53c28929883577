"""Rewards that run the program in an answer."""
