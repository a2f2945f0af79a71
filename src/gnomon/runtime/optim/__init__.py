"""The optimizer of one rank: rules of the update, learning rate, gradient norm, loss scale.

`Update` updates the part of each stage that this rank has. Leaves out updates on the host (`runtime.step.host_update`).
"""
