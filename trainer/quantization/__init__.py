"""A frozen base in fewer bits: the formats, a linear layer that holds one, and reading it from a checkpoint.

The arithmetic stays that of `recipe`: a weight is dequantized when it is used, in the forward and again in the backward
pass, and never kept.
"""
