"""Sampling: rows of parameters, logits to ids, logprobs, grammar masks. It imports nothing here, so that grammar.py
can be had without torch.
"""
