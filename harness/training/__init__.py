"""Has the models, the text, the training loop, and the rows: the ways to train that tables compare.

The ways are the stages, the four optimizers of this repository, and what they are compared with: optimizers of torch,
and replicated training, in which every rank holds everything.
"""
