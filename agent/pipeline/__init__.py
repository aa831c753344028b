"""A model written for one device, cut into stages that train together without changing its numbers.

tracing    from a script's loss function to a graph that can be cut
stages     from a graph to stages, and a schedule played with tensors
deferred   initial values, made only on the workers that hold them

What all three use lies beside them: `flatten` takes a microbatch apart, `autocast_nodes` and `loss_scale` are
nodes of a graph that say under what it computes.
"""
