"""What measuring and training need and no stage may know. Who calls whom, from the programs downwards:

    programs      bench.py   network   timeline   gpu   faults   report   docs   train_ddp     each is a `make` target
    what they do  measure: checks, counts and times a row     tables: what was measured, in words
                  timeline: records one step of a row         report: tables and pictures into the pages
                  operations: a rank ends before each file operation of a save
    a row         peers: ways to train the same model, the stages among them     workload: the model, its data, train.py
                  resume: a run stops at a signal, and goes on
    instruments   ledger: what travels     memory: what is held
    ranks         launch: how they start, find each other, and end
    everybody     cli: bad input, files, Ctrl-C

A file imports from its own line or from those below, and never in a circle; stages' train.py import workload only.
"""

from harness import cli as cli  # before torch, which takes seconds: from here on Ctrl-C is one word
