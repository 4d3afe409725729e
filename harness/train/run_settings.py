"""The settings of a run that must not change when it goes on, and those that may."""


def settings_of(args, world_size):
    """What a checkpoint says of its run: option -> value. With other values of DATA_ORDER a step sees other text."""
    return {"--seed": args.seed, "--data": args.text, "ranks x --batch-size": world_size * args.batch_size,
            "--accumulate": args.accumulate, "--sequence-length": args.sequence_length,
            "--steps": args.steps, "--clip": args.clip, "--dtype": args.dtype,
            "--lr": args.lr, "--weight-decay": args.weight_decay}


DATA_ORDER = ("--seed", "--data", "ranks x --batch-size", "--accumulate", "--sequence-length")


def changes(before, now):
    """-> {option: (value before, value now)}, as text. A text is the same one wherever it is."""
    def text_of(value):
        return "{} ({} bytes, checksum {:08x})".format(*value) if isinstance(value, (tuple, list)) else f"{value}"

    def compared(value):
        return list(value[1:]) if isinstance(value, (tuple, list)) else value

    return {option: (text_of(before[option]), text_of(value)) for option, value in now.items()
            if option in before and compared(before[option]) != compared(value)}


def take_hyperparameters(args, optimizer, scheduler):
    """Learning rate, its schedule and weight decay are those of `args` from here on, whatever the checkpoint had."""
    scheduler.base_lrs = [args.lr] * len(optimizer.param_groups)
    for group, factor in zip(optimizer.param_groups, scheduler.lr_lambdas):
        group["initial_lr"], group["weight_decay"] = args.lr, args.weight_decay
        group["lr"] = args.lr * factor(scheduler.last_epoch)
