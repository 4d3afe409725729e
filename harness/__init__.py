"""What measuring and training need and no stage may know, in rooms. (The rooms are split further in the next step.)

    run       command line, ranks: how they start, find each other, end     rows      ways to train the same model
    train     model, data, what every train.py does, resuming               measure   checks, counts, times a row
    report    tables, pages, their check                                    plan      what a run would hold and take
    faults    kills, signals, a stopped rank

No file imports itself by way of others; stages' train.py import harness.train.workload only.
"""

from harness.run import cli as cli  # before torch, which takes seconds: from here on Ctrl-C is one word
