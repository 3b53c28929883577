"""Forecast memory, traffic and seconds of a run on a cluster that is not here.

The forecast needs no device. `shapes` and `hardware` hold numbers of public configs and data sheets, and
known.toml the share of a data sheet that is reached, with sources. `layout` is arithmetic. `simulate` runs the real
`RolloutScheduler` on a virtual clock, `search` divides the devices, and `text` writes the result and names the parts of
gnomon that would not support the plan.
"""
