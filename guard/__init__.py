"""What makes a core an optimizer that one can rely on: one file a concern, each for a situation of users.

A stage's `distributed.py` puts these classes in front of its core, `ShardedOptimizer`. Each adds its part to a method,
and calls the next by `super()`. The order has reasons. From left to right stand:

- who waits for what others read, and who widens what is asked of ranks: AwaitsReaders, TensorParallel;
- who brings gradients together: AnyGrads in stages 1 to 3; Agreement, Rounds and Drops in stage 4;
- who takes the averaged gradients: Clipped, Scaled;
- who brings parameters or states elsewhere: Modes; WholeState in stages 1 and 2, StateOfPieces in 3 and 4;
- Wrapper next to the core: it has `step`, and hands hyperparameters to the inner optimizer and back.

Of stage 4, by method, what runs first on the left (`make seams STAGE=4`):

    bucket_class         DistributedOptimizer > ShardedOptimizer
    shard                AwaitsReaders > Drops > StateOfPieces > Wrapper > ShardedOptimizer
    step_own             Agreement > StateOfPieces > Wrapper > ShardedOptimizer
    sync_params          AwaitsReaders > Agreement > ShardedOptimizer
    step                 Wrapper > ShardedOptimizer
    zero_grad            AwaitsReaders > Agreement > ShardedOptimizer
    on_grad_ready        Rounds > ShardedOptimizer
    send_grads           Rounds > ShardedOptimizer
    prefetch_params      AwaitsReaders > ShardedOptimizer
    watch                Drops > ShardedOptimizer
    _prepare             Rounds > Drops > Wrapper
    no_sync              Rounds > Wrapper
    state_dict           StateOfPieces > Wrapper
    _bounds              TensorParallel > StateOfPieces
    _take_model_changes  Drops > Modes
    _groups_of_ranks     TensorParallel > Scaled
    _total_norm          TensorParallel > Clipped
    has_grads            Rounds > Modes
    finish_grad_sync     AwaitsReaders > Agreement
    _grads_elsewhere     Agreement > Scaled
"""
