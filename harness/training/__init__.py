"""Says which model is trained, on which text, and in which ways, which are the rows of tables.

The ways are the stages, which are the four optimizers of this repository, and what they are compared with: replicated
training, in which every rank holds everything, and optimizers of torch.
"""
