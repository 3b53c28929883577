"""What a cluster would do: memory, traffic and seconds of a run on hardware that is not here, and how far it is right.

Formulas and a simulation, no device: `shapes` and `hardware` are read off public configs and data sheets,
`efficiencies` says what share of those is reached and who says so, `layout`, `traffic` and `stages` are arithmetic,
`simulate` lets the real `RolloutScheduler` wait on a virtual clock, `search` divides the devices, `limits` knows which
parts of gnomon would not carry it, `text` says what came out.
"""
