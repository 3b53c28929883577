"""What is wrong with a run, in words: rules over what it measured, while it trains and afterwards."""
