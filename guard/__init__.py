"""What makes a core an optimizer that one can rely on: one file a concern, each for a situation of users.

A stage's `distributed.py` puts the classes in front of its core, `ShardedOptimizer`. Each adds its part to a method and
calls the next by `super()`. Whoever stands further left runs earlier on the way in. The order has reasons:

- Who only looks at how the core is used comes first, before anything is changed: AwaitsReaders, which waits for what
  others read, and TensorParallel, which widens what the others ask (over which ranks?).
- Then gradients, since the norm, the loss scale and the state are of what they leave: AnyGrads, or Agreement, Rounds
  and Drops.
- Then who uses averaged gradients: Clipped, Scaled.
- Then who brings parameters or state to others: Modes, WholeState or StateOfPieces.
- Wrapper is last, next to the core: it has `step`, and hands the hyperparameters to and fro around the inner step.

`make seams STAGE=4` prints which class adds to which method, in the order in which they run. It is made from the code,
and seams.txt keeps it.
"""
