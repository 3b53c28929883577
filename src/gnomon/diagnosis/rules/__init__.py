"""The rules, by what they look at; `catalog` lists them."""
