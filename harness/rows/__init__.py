"""What is compared: ways to train the same model, their formulas, bucket sizes, and what is kept of one.

Called by measure and plan, which fill rows, and by report, which shows them.
"""
